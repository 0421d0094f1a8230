"""Where a run's numbers come from, for its records: its setting, its sessions, its inputs."""

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any

import torch

from fedlens import params
from fedlens.config import compose
from fedlens.config.compose import row_of
from fedlens.config.identity import identity
from fedlens.config.labels import labels
from fedlens.config.schema import Config, unit
from fedlens.errors import FedlensError
from fedlens.params import Params
from fedlens.registry import backbone
from fedlens.sparse.masks import Masks
from fedlens.store import manifest
from fedlens.store.run_folder import RunFolder

log = logging.getLogger(__name__)


def setting(config: Config) -> dict[str, Any]:
    """What every record names, so that no number is taken for one of another setting."""
    shown = labels(config)
    return {
        "experiment": config.experiment,
        "labels": shown,
        "data": config.data.name,
        "backbone": backbone.spelled(config.backbone),
        "resolution": config.backbone.resolution,
        "pretrained": config.backbone.pretrained,
        "seed": config.seed,
        "unit": unit(config),
        **(_sparse(config) if config.sparse.density is not None else {}),
        **(_federated(config, shown["algorithm"]) if config.federated.clients else {}),
    }


def _sparse(config: Config) -> dict[str, Any]:
    return {"density": config.sparse.density, "mask_rule": config.sparse.rule.name}


def _federated(config: Config, algorithm: str) -> dict[str, Any]:
    return {
        "clients": config.federated.clients,
        "partition": row_of(config, "partition").portable(config.partition),
        "algorithm": algorithm,
        "local_steps": config.federated.local_steps,
    }


def record_session(
    config: Config, folder: RunFolder, input_hashes: dict[str, Any], device: torch.device
) -> None:
    """Adds this session to the manifest; refuses to continue with other data or code."""
    used = {
        key: {"file": plugin.file, "sha256": plugin.sha256}
        for key, plugin in compose.plugins_of(config).items()
        if key != "engine"  # a run may change it
    }
    row = row_of(config, "engine")
    session = manifest.session(
        device,
        # A SuperLink started this process: its own command says nothing to a reader.
        command=[*compose.command(config), "engine=flower"] if row.name == "flower" else None,
        packages=row.traits.get("packages", ()),
    )
    digest, record = _digest(config), folder.manifest
    if record is None:
        if folder.checkpoints.is_dir():  # what was written after it is there
            raise FedlensError(
                f"{folder.path / 'manifest.json'} is lost, so what {folder.name} began with cannot "
                "be checked: restore it from a copy, or start another run under another run.name."
            )
        record = {
            "name": folder.name,
            **setting(config),
            "config": digest,
            "inputs": input_hashes,
            **({"plugins": used} if used else {}),
            "sessions": [],
        }
    with folder.named_in_errors():
        manifest.check_config(record, digest)
        manifest.check_inputs(record, input_hashes)
        manifest.check_plugins(record, used)
        sessions = [*record["sessions"], session]
        changed = manifest.differences(sessions[0], session)
    if changed:
        log.warning("%s differ from the first session: the last bits may too", ", ".join(changed))
    folder.write("manifest", {**record, "sessions": sessions})


def _digest(config: Config) -> str:
    """The SHA-256 of what decides the result, except where the weights lie: they have their own."""
    portable = replace(config, backbone=config.backbone.but(weights=None))
    return hashlib.sha256(json.dumps(identity(portable), sort_keys=True).encode()).hexdigest()


def record_mask_digest(folder: RunFolder, masks: Masks) -> None:
    """Notes the masks in the manifest; refuses others than the run began with."""
    record, digest = folder.manifest or {}, params.digest(masks)
    if "masks" not in record:
        folder.write("manifest", {**record, "masks": digest})
    elif record["masks"] != digest:
        raise FedlensError(
            f"{folder.masks} holds other masks than {folder.name} began with: restore the file, or "
            "start another run under another run.name."
        )


def record_head_digest(folder: RunFolder, head: Params) -> None:
    """Notes the head in the manifest, where it is kept with the run."""
    record = folder.manifest or {}
    if folder.head.exists() and "head" not in record:
        folder.write("manifest", {**record, "head": params.digest(head)})


def check_head_digest(folder: RunFolder, head: Params) -> None:
    """Refuses another head than the run began with, where it is known."""
    record = folder.manifest or {}
    if "head" in record and record["head"] != params.digest(head):
        raise FedlensError(
            f"{folder.head} is lost, or holds another head than {folder.name} began with: restore "
            "the file, or start another run under another run.name."
        )
