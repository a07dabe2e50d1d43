"""Mixed precision: which layers keep the higher types, and which get the lower ones.

options    what is allowed, and when to stop
plan       the choice for every layer, with its sensitivity; a file to read, edit and use again
search     as many layers as quality allows, or the least harm within a budget; numbers and names only
networks   the networks that are tried;  quality   how good each of them is
on_onnx    from a model and its samples to the options that the plan is made by
report     the line and the table of the summary
"""
