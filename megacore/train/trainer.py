"""The training loop. `Trainer.run` is a whole run; its parts are the methods below it.

A step: read the batch, train on it (`step.TrainStep`), then log, validate and save where that is due. If too
many steps in a row are skipped, the run goes back to a checkpoint. If a rank is asked to stop, all ranks save
a checkpoint and stop after the same step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint import Ranks
from megacore.checkpoint.weights import SPECIAL_TOKENS
from megacore.config import Config
from megacore.config.implied import check_settled
from megacore.config.schema import resolved
from megacore.distributed.buffers import SAVED_STATE, unsaved_state
from megacore.distributed.collectives import all_reduce
from megacore.distributed.events import Listener
from megacore.distributed.mesh import Mesh
from megacore.engine.choose import Engines
from megacore.errors import CheckpointError, ConfigError, LogError
from megacore.model.batch import Microbatch
from megacore.train.callbacks import Callback
from megacore.train.checkpointing import (
    Inputs,
    Origin,
    Saving,
    choose_checkpoint,
    read_training_state,
    read_weights,
)
from megacore.train.evaluation import evaluate
from megacore.train.loader import Loader
from megacore.train.metrics import PendingResults, Reporter, Utilisation, unknown_utilisation
from megacore.train.records import Records, RecordWriter
from megacore.train.recovery import Skips, StopAgreed, TooManySkips
from megacore.train.step import StepResult, TrainStep

FINISHED, STOPPED = 0, 75  # exit statuses; 75 asks a scheduler to start the job again
SHARED_FOLDER = (
    "a folder that all machines share; or checkpoint.every=0 checkpoint.last=false, which saves nothing"
)


class Trainer:
    """One rank's part in a run.

    Construction and what trains, logs, validates, saves or restores are collective over all ranks.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        inputs: Inputs,
        *,
        records: Records | None = None,
        prune: Callable[[Path], None] = lambda newest: None,
        utilisation: Utilisation = unknown_utilisation,
        folder_not_shared: str = "",
        engines: Engines | None = None,
        decided: str = "",
    ) -> None:
        """Build the model, and draw its weights or read them from a checkpoint.

        `config`: complete, without any `auto` (see `megacore.tools.choices`). Callbacks are in
        `mesh.listeners`. `records`: on rank 0, where to write them. `prune`: deletes old checkpoints, see
        `Saver`. `folder_not_shared`: says which machines do not share the run's folder, if that was found.
        `engines`: see `TrainStep`. `decided`: what `auto` settings became, and why, to be printed.
        """
        check_settled(config)
        if folder_not_shared and (config.checkpoint.every or config.checkpoint.last):
            raise ConfigError("log.dir", folder_not_shared, SHARED_FOLDER)
        self.config = config
        self.mesh = mesh
        self.inputs = inputs
        self.folder_not_shared = folder_not_shared
        self.decided = decided
        self.stop_requested: Callable[[], bool] = lambda: False  # whether this rank is asked to stop
        self.records = RecordWriter(records, mesh)

        self.notify(Callback.on_start, config, mesh)
        self.train_step = TrainStep(config, mesh, draw=False, engines=engines)
        self.engine = self.train_step.engine
        self.loader = Loader(config, mesh, inputs.stream)

        self.skips = Skips(config.optim.max_skips, config.optim.max_rollbacks)
        # Step i trains on batch i + offset: rollbacks pass over batches, and so may another batch size.
        self.batch_offset = 0
        # Entries of a checkpoint's state that training does not use: from the checkpoint that the run began
        # with, and from the script that trains.
        self.extra_state = dict[str, Any]()
        self.origin = self.restore()
        self.step = self.origin.step  # the current step, or the last one that is done
        self.notify(Callback.on_built, self.train_step)

        self.pending = PendingResults(mesh.device, mesh.listeners)
        self.saving = Saving(config, mesh, self.engine, prune)
        self.reporter = Reporter(config, mesh, self.saving, utilisation)
        self.records.open(config, self.step + 1)
        if self.is_writer:
            self.notify(Callback.on_records_open, Path(resolved(config.log.dir)), self.step + 1)

    def run(self, stop_requested: Callable[[], bool] = lambda: False) -> int:
        """Train from the step after the last checkpoint to `train.steps`. Return the exit status.

        `stop_requested` says whether this rank is asked to stop. It is called in every step, and must stay
        true once it is true.
        """
        self.stop_requested = stop_requested
        train = self.config.train
        checkpoint = self.config.checkpoint
        try:
            self.check_stop()
            self.reporter.start()
            while self.step < train.steps:
                self.step += 1
                batch = self.next_batch()
                # `hold_update`: the update must not change tensors that a save in the background still
                # copies. On a GPU its stream waits for the copy, on a CPU the host does.
                result = self.train_step(
                    self.step, batch, self.flags, before_update=self.saving.saver.hold_update
                )
                self.reporter.count(batch)

                # On a GPU these are of an earlier step: its host launches the next step meanwhile.
                self.pending.post(result)
                results = self.take_results(all_of_them=self.is_logged)
                self.saving.poll(failed=any(arrived.flags["save_failed"] for arrived in results))
                if self.is_logged:
                    self.log(results[-1])
                self.count_skips(results)
                if self.skips.are_too_many:
                    self.roll_back()
                    continue
                if any(arrived.flags["stop"] for arrived in results) and not self.is_last:
                    raise StopAgreed

                validates = self.is_due(train.eval_every) and not self.is_last
                saves = self.is_due(checkpoint.every) or (checkpoint.last and self.is_last)
                if validates:
                    self.validate()
                if saves:
                    self.save()
                if (validates or saves) and not self.is_last:
                    self.check_stop()  # they take long, and have waited for the device anyway
            return self.finish()
        except StopAgreed:
            return self.stop()
        finally:
            self.close()

    # A step

    @property
    def is_last(self) -> bool:
        """Whether the current step is the run's last."""
        return self.step == self.config.train.steps

    @property
    def is_logged(self) -> bool:
        """Whether the current step is logged, for which the host waits for the device."""
        return self.is_due(self.config.log.every) or self.is_last

    def is_due(self, every: int | None) -> bool:
        """Return whether the current step is a multiple of `every`; never for 0 or None."""
        return every is not None and every > 0 and self.step % every == 0

    def next_batch(self) -> list[Microbatch]:
        """Begin the current step: tell callbacks, and return this rank's microbatches."""
        self.notify(Listener.on_step_begin, self.step, self.is_logged)
        self.mesh.listeners.phase("data")
        return self.loader.read(self.step + self.batch_offset)

    def flags(self) -> dict[str, bool]:
        """Return what ranks decide together in a step: each flag counts if any rank raises it."""
        return {"stop": self.must_stop, "save_failed": self.saving.saver.failed}

    def take_results(self, *, all_of_them: bool) -> list[StepResult[float]]:
        """Return the results that are due, and tell callbacks: on a CPU of this step, on a GPU of step i - 2.

        So a GPU's host waits until step i - 2 is done. With `all_of_them` it waits for this step too.
        """
        results = self.pending.take(all_of_them=all_of_them)
        for result in results:
            self.notify(Callback.on_step, result)
        return results

    # Logs and validation

    @property
    def is_writer(self) -> bool:
        """Whether this is rank 0, which prints and writes records."""
        return self.mesh.rank == 0

    def notify(self, event: Callable[..., Any], *arguments: Any) -> None:
        """Call a method of `Callback`, such as `Callback.on_log`, on all callbacks."""
        self.mesh.listeners.notify(event, *arguments)

    def log(self, result: StepResult[float]) -> None:
        """Log a step that the device has finished."""
        report = self.reporter.report(result, self.saved_step, self.train_step.stages)
        self.record(report.metrics)
        self.notify(Callback.on_log, report)

    def record(self, record: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl."""
        self.records.write(record)
        if self.is_writer:
            self.notify(Callback.on_record, record)

    def validate(self) -> float | None:
        """Return the mean loss over the validation set (or `eval_batches` batches of it), in nats a token.

        None without a validation set. Raises `StopAgreed` if a rank is asked to stop meanwhile.
        """
        if self.inputs.validation is None:
            return None
        with self.reporter.timer.pause(), self.mesh.listeners.pause("validation"), self.engine.evaluating():
            evaluation = evaluate(
                self.config,
                self.train_step.runtime,
                self.mesh,
                self.inputs.validation,
                between=self.check_stop,
            )
        if evaluation.targets == 0:
            self.mesh.print(
                f"step {self.step}: no validation loss: of what train.eval_batches reads, no token is learned"
            )
            return None

        loss = evaluation.loss
        self.notify(Callback.on_validation, loss)
        if self.step > self.origin.step:  # a run that had no step left has recorded it before
            self.record({"step": self.step, "valid_loss": loss})
        self.mesh.print(f"step {self.step}: validation loss {loss:.4f}")
        return loss

    # Checkpoints

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint that this run has saved or resumed."""
        return self.saving.latest or self.origin.checkpoint

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this run has saved or resumed; 0 without one."""
        return max(self.saving.latest_step, self.origin.step)

    def save(self) -> None:
        """Save a checkpoint of the current step.

        Raises:
            CheckpointError: if machines share no folder for it, or if a layer was given state after it was
                built, which a checkpoint would lack.
        """
        if self.folder_not_shared:
            folder = resolved(self.config.log.dir)
            raise CheckpointError(folder, f"nothing was saved: {self.folder_not_shared}", SHARED_FOLDER)
        for stage in self.train_step.stages:
            if unsaved := unsaved_state(stage):
                wrong = f"nothing was saved: the model has got {unsaved[0]}, which no checkpoint saves"
                right = f"in the layer's constructor {SAVED_STATE}"
                raise CheckpointError(resolved(self.config.log.dir), wrong, right)

        samples = self.config.train.samples_through(self.step + self.batch_offset)
        progress = {"samples": samples, "rollbacks": self.skips.rollbacks}
        with self.reporter.timer.pause(), self.mesh.listeners.pause("saving"):
            self.saving.save(self.step, progress | self.extra_state)

    def restore(self) -> Origin:
        """Resume a checkpoint, or start from another one's weights, or draw weights, as `checkpoint` says."""
        checkpoint = choose_checkpoint(self.inputs, self.mesh)
        if checkpoint is None:
            self.train_step.draw()
            origin = Origin()
        else:
            reader, weights_only = checkpoint
            if SPECIAL_TOKENS in reader.state:
                self.extra_state[SPECIAL_TOKENS] = reader.state[SPECIAL_TOKENS]
            if weights_only:
                origin = read_weights(reader, self.train_step, self.mesh)
            else:
                origin = read_training_state(reader, self.train_step, self.mesh)
                self.skips.restore(reader.state["engine"]["skipped"], reader.state["rollbacks"])
                batches = self.config.train.batches_in(reader.state["samples"])
                self.batch_offset = batches - origin.step
        self.train_step.begin(origin.step)  # a validation before the next step has the settings of the last
        return origin

    # Recovery from bad batches

    def count_skips(self, results: list[StepResult[float]]) -> None:
        """Count skipped steps, and report their samples."""
        for result in results:
            if self.skips.count(result):
                self.report_skipped(result)

    def roll_back(self) -> None:
        """Go back to the last checkpoint, and continue from there with samples that were not read yet."""
        self.skips.count_rollback()
        # Steps that were launched meanwhile are undone too, and their samples are passed over.
        for result in self.take_results(all_of_them=True):
            self.report_skipped(result)
        self.saving.finish()
        if self.saved_step == 0:
            raise TooManySkips(
                f"{self.skips.limit} steps in a row were skipped, and there is no checkpoint to go back to"
            )
        step, batch_number = self.step, self.step + self.batch_offset
        if self.is_writer:
            self.inputs.look_again(self.origin.checkpoint, self.origin.step)
        with self.reporter.timer.pause(), self.mesh.listeners.pause("going back to a checkpoint"):
            self.origin = self.restore()
        self.saving.forget()  # a newer checkpoint than this one turned out to be damaged
        self.step = self.origin.step
        self.batch_offset = batch_number - self.step

        self.records.rewind(self.step + 1)
        if self.is_writer:
            self.notify(Callback.on_rewind, self.step + 1)
        sample = self.config.train.samples_through(batch_number)
        self.mesh.print(f"after step {step} back to {self.origin.checkpoint}, and on with sample {sample}")

    def report_skipped(self, result: StepResult[float]) -> None:
        """Record a step that was skipped, or undone by a rollback, and the numbers of its samples."""
        train = self.config.train
        batch_number = result.step + self.batch_offset
        record = {
            "step": result.step,
            "first_sample": train.samples_through(batch_number - 1),
            "last_sample": train.samples_through(batch_number) - 1,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
        }
        self.records.write_skipped(record)
        if self.is_writer:
            self.notify(Callback.on_skipped, record)

    # The end of a run

    @property
    def must_stop(self) -> bool:
        """Whether this rank is asked to stop, or can no longer write what the run does."""
        return self.stop_requested() or bool(self.records.error)

    def check_stop(self) -> None:
        """Raise `StopAgreed` on all ranks if any rank must stop. Waits for the device."""
        flag = torch.tensor(float(self.must_stop), dtype=torch.float64, device=self.mesh.device)
        if all_reduce(flag, self.mesh.world).item():
            raise StopAgreed

    def finish(self) -> int:
        """End a run whose steps are all done: finish the last save, validate, print where everything is.

        Raises `StopAgreed` if a rank is asked to stop during the validation.
        """
        # Callbacks that check the weights before a save, as `tools.drift` does, check the last ones too.
        with self.mesh.listeners.pause("saving"):
            self.saving.finish(last=True)
        loss = self.validate()
        if loss is not None:
            entropy = self.inputs.unigram_entropy()
            unigram = (
                ""
                if entropy is None
                else f"; {entropy:.4f} for a model that knows only how frequent each token is"
            )
            self.mesh.print(f"final validation loss {loss:.4f} nats a token{unigram}")
        if self.latest is not None:
            self.mesh.print(f"checkpoint: {self.latest}")
        log = self.config.log
        tensorboard = f", and tensorboard --logdir {log.dir}" if log.tensorboard else ""
        self.mesh.print(f"records: {log.dir}/metrics.jsonl{tensorboard}")

        self.check_records()
        self.engine.close()
        return FINISHED

    def stop(self) -> int:
        """End a run that all ranks have agreed to stop, with a checkpoint to resume."""
        self.count_skips(self.take_results(all_of_them=True))
        self.save_before_exit()
        self.check_records()
        self.mesh.print(f"stopped on request after step {self.step}; the same command resumes from there")
        self.engine.close()
        return STOPPED

    def save_before_exit(self) -> None:
        """Make sure that a checkpoint of the current step is on disk."""
        self.saving.finish()
        if self.step != self.saved_step:
            self.save()
        self.saving.finish(last=True)

    def check_records(self) -> None:
        """If records could not be written, save a checkpoint and raise `LogError` on all ranks."""
        reason = Ranks(self.mesh).first(self.records.error)
        if reason:
            self.save_before_exit()
            right = f"make room, or see to its folder; the same command resumes from step {self.step}"
            raise LogError(f"{self.config.log.dir}/metrics.jsonl", f"cannot be written: {reason}", right)

    def close(self) -> None:
        """End threads, close files, and release the terminal, so that a failure's reason is printed last."""
        self.loader.close()
        self.records.close()
        self.notify(Callback.on_end)
