"""What ``gpu-flows demo`` trains."""
