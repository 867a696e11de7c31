"""What a config resolves to and what a run did, as text and figures.

``show`` describes a Program before anything runs; ``curves`` draws the loss of a run from its folder.
"""
