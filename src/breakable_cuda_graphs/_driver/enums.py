"""The driver's numbers for results, kinds of nodes, memory, attributes and flags, named as in its API.

The hard problem: enumerations of the bindings are slow to compare and differ between versions, while the
numbers behind them never change. So the numbers are written out once, here, for reading, writing and the
simulated driver alike. (CUDA driver API, "Data types used by CUDA driver".)
"""

from __future__ import annotations

from enum import IntEnum

#: CUresult
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = range(4)
INVALID_DEVICE, INVALID_CONTEXT = 101, 201
INVALID_HANDLE, ILLEGAL_STATE, LOSSY_QUERY = 400, 401, 402
NOT_FOUND, NOT_READY = 500, 600
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED, LAUNCH_FAILED = 700, 709, 719
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
(
    CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNMATCHED, CAPTURE_UNJOINED,
    CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT, CAPTURE_WRONG_THREAD,
) = range(900, 909)  # fmt: skip
UPDATE_FAILURE, INVALID_CLUSTER_SIZE = 910, 912

#: CUgraphNodeType
KERNEL, MEMCPY, MEMSET, HOST, CHILD, EMPTY, EVENT_WAIT, EVENT_RECORD = range(8)
MEM_ALLOC, MEM_FREE, BATCH_MEM_OP, CONDITIONAL = 10, 11, 12, 13

#: Graphs with these nodes, or with nodes we do not know, cannot be cloned, so they cannot be children
#: (driver API, cuGraphClone and cuGraphAddChildGraphNode).
NO_CHILDREN = frozenset({MEM_ALLOC, MEM_FREE, CONDITIONAL, -1})

#: Kinds that the bodies of conditional nodes may hold (CUDA driver API, conditional nodes).
IN_BODIES = frozenset({KERNEL, MEMCPY, MEMSET, CHILD, EMPTY, CONDITIONAL})

#: CUgraphConditionalNodeType, and the flag of CU_GRAPH_COND_ASSIGN_DEFAULT
IF, WHILE, SWITCH = range(3)
ASSIGN_DEFAULT = 1

#: CUmemorytype
HOST_MEMORY, DEVICE_MEMORY, ARRAY_MEMORY, UNIFIED_MEMORY = 1, 2, 3, 4

#: CUlaunchAttributeID, and the keys of a launch's `extra` (CU_LAUNCH_PARAM_*)
COOPERATIVE, CLUSTER, PROGRAMMATIC, PRIORITY, DEVICE_UPDATABLE = 2, 4, 6, 8, 13
PARAM_END, PARAM_BUFFER, PARAM_SIZE = range(3)

#: CUstreamBatchMemOpType
WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5

#: CUstreamCaptureMode
GLOBAL, THREAD_LOCAL, RELAXED = range(3)

#: Flags of streams and of events
NON_BLOCKING = 1
BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS = 1, 2, 4

#: CUgraphInstantiate_flags
AUTO_FREE, UPLOAD, DEVICE_LAUNCH, USE_NODE_PRIORITY = 1, 2, 4, 8

#: CUuserObject_flags; and the flag by which a graph takes a user object over, or a node a graph
NO_DESTRUCTOR_SYNC = 1
MOVE = 1


class UpdateResult(IntEnum):
    """CUgraphExecUpdateResult."""

    SUCCESS = 0
    ERROR = 1
    TOPOLOGY_CHANGED = 2
    NODE_TYPE_CHANGED = 3
    FUNCTION_CHANGED = 4
    PARAMETERS_CHANGED = 5
    NOT_SUPPORTED = 6
    UNSUPPORTED_FUNCTION_CHANGE = 7
    ATTRIBUTES_CHANGED = 8
