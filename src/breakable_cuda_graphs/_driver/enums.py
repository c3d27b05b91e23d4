"""The driver's numbers for kinds of nodes, memory and attributes, under the names of its API.

The hard problem: enumerations of the bindings are slow to compare and differ between versions, while the
numbers behind them never change. So the numbers are written out once, here, for reading, writing and the
simulated driver alike. (CUDA driver API, "Data types used by CUDA driver".)
"""

from __future__ import annotations

#: CUgraphNodeType
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY, EVENT_WAIT, EVENT_RECORD = range(8)
MEM_ALLOC, MEM_FREE, BATCH_MEM_OP, CONDITIONAL = 10, 11, 12, 13

#: Graphs with these nodes, or with nodes we do not know, cannot be cloned, so they cannot be children
#: (driver API, cuGraphClone and cuGraphAddChildGraphNode).
NO_CHILDREN = frozenset({MEM_ALLOC, MEM_FREE, CONDITIONAL, -1})

#: CUgraphConditionalNodeType
IF, WHILE, SWITCH = range(3)

#: CUmemorytype
HOST_MEMORY, DEVICE_MEMORY, ARRAY_MEMORY, UNIFIED_MEMORY = 1, 2, 3, 4

#: CUlaunchAttributeID
COOPERATIVE, CLUSTER, PROGRAMMATIC, PRIORITY, DEVICE_UPDATABLE = 2, 4, 6, 8, 13

#: CUstreamBatchMemOpType
WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5
