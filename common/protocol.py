"""Which form of the protocol between routers and workers this version speaks."""

PROTOCOL_VERSION = 2  # 2: adapters, blocks in host memory, ExplainCache; routers of 2 work with workers of 1
