"""Readers of the stream that an engine emits: none of them needs the engine, or torch.

view          EngineView, the fold: the engine at one moment
recording     record, open_recording, Recording: a stream that was kept
frames        a recording as pandas data frames
why           the sentence behind each decision
provenance    where the tokens of a request came from, and why the prefix cache missed
block_story   what happened to a block, and when its content will go
picture       frames for the widgets and the page (docs/picture.md)
html          one page with a whole run
text_picture  the picture in characters
"""
