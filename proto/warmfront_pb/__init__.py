"""What is said on the wire, and what stands in Redis. The comments of the .proto files are the reference."""
