"""gpu-flows for Airflow: a thin package over the engine in `gpu_flows`."""
