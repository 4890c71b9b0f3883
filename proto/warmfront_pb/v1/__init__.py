"""Version 1 of the messages and services: generated code beside the .proto files it comes from."""
