"""Beside MindSpeed: its own FSDP2 feature stands aside, everything else of it stays as it is."""
