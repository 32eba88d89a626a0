"""The links between the nodes: interfaces, cables, rates, and what NCCL makes of them."""
