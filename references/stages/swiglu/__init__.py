"""The gated activation, with and without quantization."""
