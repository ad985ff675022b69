"""One instantiation of TensorRT-LLM's fused MoE runner, compiled from an installed FlashInfer.

FlashInfer's own module of it is 28 sources and 219 generated ones, most of them GEMMs that no
block-scaled layer reaches.  ``runner.cu`` and ``other_gemms.cu`` are ours: a C interface, and what
stands in for those GEMMs.  All arithmetic is in the sources that FlashInfer ships.
"""
