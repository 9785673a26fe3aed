def replaced(*args, **kwargs):
    raise AssertionError("MindSpeed's own FSDP2 ran")


def wrapped_wrapper(fn):
    return lambda *args, **kwargs: replaced()
