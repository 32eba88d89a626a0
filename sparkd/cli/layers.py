"""The layers of the checkpoint that a user calls MODEL: a folder, a configured name, a hub id, or a name that the daemon knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparkd.capacity.formats import mix_of
from sparkd.capacity.layers import LayerListing, layers_of
from sparkd.checkpoint.remote_headers import Progress, checkpoint_at
from sparkd.cli.named_entry import configured, of_daemon, of_hub, value_of
from sparkd.config.engine_args import engine_args
from workers.quantization.best_wish import best_of
from workers.quantization.recipe import QuantizationRecipe


def listing_of(
    model: str,
    quantize: str | None,
    config_file: Path | None,
    environ: Mapping[str, str],
    ask: Callable[[str], Mapping[str, Any]],
    progress: Progress | None = None,
) -> LayerListing:
    """The layers of MODEL, under its own recipe or the one of the command line.

    quantize: a recipe as YAML, in place of the configured one.
    ask: for the settings of the daemon's model of a name, called only where nothing else knows `model`.
    progress: called for each header that had to come from the hub, because the local cache has not all of the model.

    Raises ConfigError, CheckpointError.
    """
    named = configured(model, config_file, environ) or of_hub(model, config_file, environ) or of_daemon(model, config_file, environ, ask)
    spec = named.spec
    env = {**environ, **spec.environment(named.config.engine)}
    args, wanted = engine_args(spec, env), None if quantize is None else value_of(quantize)
    checkpoint = checkpoint_at(spec.model, spec.revision, env, progress)
    if (wish := args.wish if quantize is None else best_of(wanted)) is not None:
        recipe = mix_of(checkpoint, wish)
    else:
        recipe = args.recipe if quantize is None else QuantizationRecipe.parse(wanted)
    return layers_of(checkpoint, recipe)
