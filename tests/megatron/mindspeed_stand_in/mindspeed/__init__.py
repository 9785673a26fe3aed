"""Stands in for MindSpeed where its sources are not given; the paths below are of its branch 26.0.0_core_r0.12.1."""
