"""A self-check of a machine: collectives by dtype and reduction, meshes, a training step, a checkpoint, pinned memory.

``mindspeed-fsdp2 doctor`` runs it and prints a report that can be sent to us.
"""
