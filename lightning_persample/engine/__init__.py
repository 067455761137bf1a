"""The engine: from the torch calls of a training step to a record of per-sample gradients."""

from lightning_persample.engine.call_for import call_for_per_sample_grads
from lightning_persample.engine.check_rule import check_rule
from lightning_persample.engine.coverage import listed, warn_user, warning_texts
from lightning_persample.engine.declared import mark_samples
from lightning_persample.engine.expanded_weight import ExpandedWeight
from lightning_persample.engine.failure import FAULT, Once, fault_of, guard, of_user, once, run_all, stop
from lightning_persample.engine.fast_path import without_compilation
from lightning_persample.engine.loops import loop_per_sample_grads, vmap_per_sample_grads
from lightning_persample.engine.mode import Capture, expanded_weights
from lightning_persample.engine.record import PerSampleRecord, group_name
from lightning_persample.engine.report import ParameterCheck, VerificationReport
from lightning_persample.engine.rule_report import RuleCheck, RuleReport
from lightning_persample.engine.sharded import is_sharded, sharded_elsewhere
from lightning_persample.engine.verify import check_per_sample_gradients

__all__ = [
    "FAULT",
    "Capture",
    "ExpandedWeight",
    "Once",
    "ParameterCheck",
    "PerSampleRecord",
    "RuleCheck",
    "RuleReport",
    "VerificationReport",
    "call_for_per_sample_grads",
    "check_per_sample_gradients",
    "check_rule",
    "expanded_weights",
    "fault_of",
    "group_name",
    "guard",
    "is_sharded",
    "listed",
    "loop_per_sample_grads",
    "mark_samples",
    "of_user",
    "once",
    "run_all",
    "sharded_elsewhere",
    "stop",
    "vmap_per_sample_grads",
    "warn_user",
    "warning_texts",
    "without_compilation",
]
