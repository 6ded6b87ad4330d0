"""Models as files that run without this package: ONNX, `torch.export` and AOTInductor."""
