"""What a config resolves to and what a run did, as text, figures and a page.

``show`` describes a Program before anything runs, ``data`` the text that it will see. ``page`` is the report of run
folders: ``runs`` reads them, ``curves`` and ``bars`` draw them on a ``canvas``, which decides how every figure looks.
"""
