"""What is being learnt. A task makes a model and an objective over a batch.

It knows no mesh: what it needs of one are the methods of the layout that the Program hands it.
"""
