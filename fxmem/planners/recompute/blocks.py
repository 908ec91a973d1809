"""Identical blocks: storages that play the same part in repeated pieces of a model, found by structural hashing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fxmem.planners.problem import Problem


def storage_classes(problem: Problem, radius: int = 3) -> npt.NDArray[np.int32]:
    """Class per storage: equal iff what surrounds two storages up to `radius` kernels away looks the same (targets,
    bytes, seconds to 10 %). A class is named by its first storage. Weisfeiler and Leman 1968, on the bipartite graph.
    """
    num_kernels = problem.num_kernels
    reads = [problem.reads(k).tolist() for k in range(num_kernels)]
    writes = [problem.writes(k).tolist() for k in range(num_kernels)]
    kernels = [_kernel_label(problem, k) for k in range(num_kernels)]
    storages = [hash((int(b), bool(e))) for b, e in zip(problem.nbytes, problem.keep_to_end, strict=True)]
    for _ in range(radius):
        kernels = [
            hash((kernels[k], tuple(storages[s] for s in reads[k]), tuple(storages[s] for s in writes[k])))
            for k in range(num_kernels)
        ]
        around: list[list[int]] = [[s] for s in storages]
        for k in range(num_kernels):
            for place, s in enumerate(writes[k]):
                around[s].append(hash((kernels[k], place)))
            for s in reads[k]:
                around[s].append(kernels[k])
        storages = [hash(tuple(row)) for row in around]
    first: dict[int, int] = {}
    return np.array([first.setdefault(label, s) for s, label in enumerate(storages)], dtype=np.int32)


def _kernel_label(problem: Problem, kernel: int) -> int:
    seconds = float(problem.seconds[kernel])
    pace = round(float(np.log(seconds)) / 0.1) if seconds > 0 else None
    target = problem.program.ops[int(problem.kernel_op[kernel])].target
    return hash((target, pace, int(problem.workspace_bytes[kernel]), kernel < problem.num_forward))
