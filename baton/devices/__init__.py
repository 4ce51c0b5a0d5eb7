"""The GPUs, RDMA adapters and limits of this machine, read from the driver and from sysfs."""
