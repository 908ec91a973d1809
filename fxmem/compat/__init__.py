"""Every private torch name that fxmem uses, a module for each part of torch, so that a new release breaks one folder.

What is written here is how the rest of fxmem reaches them: ``compat.storage_key``.
"""

from __future__ import annotations

from torch._dynamo import error_on_graph_break as error_on_graph_break
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import exceptions_allowed_to_be_fallback as exceptions_allowed_to_be_fallback
from torch._functorch._aot_autograd.descriptors import BufferAOTInput as BufferAOTInput
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput as InputMutationAOTOutput
from torch._functorch._aot_autograd.descriptors import ParamAOTInput as ParamAOTInput
from torch._functorch._aot_autograd.descriptors import PlainAOTInput as PlainAOTInput
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput as PlainAOTOutput
from torch._functorch._aot_autograd.descriptors import TangentAOTInput as TangentAOTInput
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from fxmem.compat.aot import AotTrace as AotTrace
from fxmem.compat.aot import aot_export_joint as aot_export_joint
from fxmem.compat.aot import default_partition as default_partition
from fxmem.compat.aot import min_cut_partition as min_cut_partition
from fxmem.compat.aot import no_aot_cache as no_aot_cache
from fxmem.compat.aot import no_donated_buffers as no_donated_buffers
from fxmem.compat.aot import no_idle_checks as no_idle_checks
from fxmem.compat.aot import retracing as retracing
from fxmem.compat.aot import saved_description as saved_description
from fxmem.compat.aot import trainable_lstms as trainable_lstms
from fxmem.compat.autograd import autocast_now as autocast_now
from fxmem.compat.autograd import autocast_state as autocast_state
from fxmem.compat.autograd import has_gradient_hooks as has_gradient_hooks
from fxmem.compat.autograd import keeps_graph as keeps_graph
from fxmem.compat.autograd import queue_after_backward as queue_after_backward
from fxmem.compat.autograd import replace_backward as replace_backward
from fxmem.compat.distributed import default_store as default_store
from fxmem.compat.distributed import is_fully_sharded as is_fully_sharded
from fxmem.compat.distributed import pipelining as pipelining
from fxmem.compat.distributed import shard_bytes as shard_bytes
from fxmem.compat.distributed import transfers_of as transfers_of
from fxmem.compat.distributed import with_transfers as with_transfers
from fxmem.compat.dynamo import RECOMPILE_LIMIT as RECOMPILE_LIMIT
from fxmem.compat.dynamo import as_dynamo_gives as as_dynamo_gives
from fxmem.compat.dynamo import fake_inputs as fake_inputs
from fxmem.compat.dynamo import graph_break as graph_break
from fxmem.compat.dynamo import innermost_user_frame as innermost_user_frame
from fxmem.compat.dynamo import isolated_compile as isolated_compile
from fxmem.compat.dynamo import past_dynamo as past_dynamo
from fxmem.compat.dynamo import placeholder_source as placeholder_source
from fxmem.compat.dynamo import quiet_dynamo as quiet_dynamo
from fxmem.compat.dynamo import seen_as_compiling as seen_as_compiling
from fxmem.compat.dynamo import torch_compile_call as torch_compile_call
from fxmem.compat.dynamo import torch_compile_call_of as torch_compile_call_of
from fxmem.compat.dynamo import with_symbolic_batch as with_symbolic_batch
from fxmem.compat.fake_tensors import fake_in_current_mode as fake_in_current_mode
from fxmem.compat.fake_tensors import fake_mode_of as fake_mode_of
from fxmem.compat.fake_tensors import fakes_of as fakes_of
from fxmem.compat.fake_tensors import no_modes as no_modes
from fxmem.compat.graphs import BoxedCodeGen as BoxedCodeGen
from fxmem.compat.graphs import flatten as flatten
from fxmem.compat.graphs import flatten_with_spec as flatten_with_spec
from fxmem.compat.graphs import module_of_graph as module_of_graph
from fxmem.compat.graphs import recompiled as recompiled
from fxmem.compat.graphs import storage_keys as storage_keys
from fxmem.compat.graphs import tensors_of as tensors_of
from fxmem.compat.inductor import compile_with_inductor as compile_with_inductor
from fxmem.compat.profiler import cpu_memory_deltas as cpu_memory_deltas
from fxmem.compat.profiler import profiler_is_active as profiler_is_active
from fxmem.compat.profiler import start_memory_log as start_memory_log
from fxmem.compat.profiler import stop_memory_log as stop_memory_log
from fxmem.compat.symbols import hint as hint
from fxmem.compat.symbols import symbol_hints as symbol_hints
from fxmem.compat.symbols import symbol_name as symbol_name
from fxmem.compat.symbols import symbol_values as symbol_values
from fxmem.compat.tensors import is_wrapper_subclass as is_wrapper_subclass
from fxmem.compat.tensors import storage_key as storage_key
from fxmem.compat.tensors import storage_nbytes as storage_nbytes
from fxmem.compat.tensors import strided_parts as strided_parts
from fxmem.compat.tensors import version as version
from fxmem.compat.tensors import write_back as write_back
