"""The training loop, from a checked config and a mesh to a trained model.

`Trainer.loop` is a run: batch, forward and backward, update, log. What it does besides stands below it:
reports, validation and checkpoints, recovery, stopping.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint import Ranks, Reader
from megacore.checkpoint.weights import (
    AVERAGES,
    SPECIAL_TOKENS,
    WEIGHTS,
    is_new,
    recorded_sections,
    weights_of,
)
from megacore.config import Config
from megacore.config.implied import check_settled
from megacore.config.schema import resolved
from megacore.distributed.buffers import BUFFERS, SAVED_STATE, unsaved_state
from megacore.distributed.collectives import all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.observer import Observer
from megacore.distributed.shard import logical_name
from megacore.engine.compression import STATE
from megacore.errors import CheckpointError, ConfigError, LogError
from megacore.model.batch import Microbatch
from megacore.train.checkpointing import Saving, choose
from megacore.train.evaluation import evaluate
from megacore.train.inputs import Inputs
from megacore.train.loader import Loader
from megacore.train.logs import Monitor, Monitors
from megacore.train.metrics import MFU, AsyncMetrics, Reporter, StepMetrics, unknown
from megacore.train.residuals import read_residuals
from megacore.train.step import TrainStep
from megacore.train.stopping import Skips, StopAgreed, TooManySkips

SHARED = "a folder that all machines share; or checkpoint.every=0 checkpoint.last=false, which saves nothing"
FINISHED, STOPPED = 0, 75  # exit statuses; 75 asks a scheduler to start the job again


class Trainer:
    """One rank's part in a run.

    Construction and methods are collective over all ranks; `due`, `votes` and what is a property are not.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        inputs: Inputs,
        monitors: Sequence[Monitor] = (),
        apart: str = "",
        utilisation: MFU = unknown,
        clean: Callable[[Path], None] = lambda newest: None,
    ) -> None:
        """`config`: settled, see `megacore.tools.choices`.

        `apart`: in words, that the machines of the run do not share its folder, if somebody has found that.
        `utilisation`: for reports.
        `clean`: deletes old checkpoints, see `Saver`.
        """
        check_settled(config)
        self.is_writer = mesh.place.rank == 0
        self.config, self.mesh, self.inputs, self.monitors = (
            config,
            mesh,
            inputs,
            Monitors(monitors, self.say),
        )
        for monitor in monitors:
            monitor.start(config, mesh)
        self.apart = apart
        if apart and (config.checkpoint.every or config.checkpoint.last):
            raise ConfigError("log.dir", apart, SHARED)

        self.train_step = TrainStep(config, mesh, draw=False)
        self.engine = self.train_step.engine
        for monitor in monitors:
            monitor.built(self.train_step)
        self.loader = Loader(config, mesh, inputs.stream)
        self.resumed: Path | None = None  # the checkpoint that this run went on from, and its step
        self.resumed_step = 0
        self.recorded = dict[str, Any]()  # sections of the config that it was written with
        self.residuals = list[str]()  # what became of those of its gradients, in up to one line
        self.origin: Path | None = None  # the checkpoint that gave the first weights
        # entries of each checkpoint's state that training does not use itself: from the checkpoint that it
        # began from, and from the script that trains
        self.passed_on = dict[str, Any]()
        self.opening: Sequence[str] = ()  # what whoever starts the run has to say of it
        self.asked: Callable[[], bool] = lambda: False  # whether somebody has asked this rank to stop
        self.ahead = 0  # batches of samples that a run has skipped by going back and around bad ones
        self.skips = Skips(config.optim.max_skips, config.optim.max_rollbacks)
        self.step = self.started = self.resume()
        self.async_metrics = AsyncMetrics(mesh.device, mesh.observers, self.train_step.named_losses)
        if self.is_writer:
            self.monitors.open(config, Path(resolved(config.log.dir)), self.step + 1)
        self.saving = Saving(config, mesh, self.engine, self.say, clean)
        self.reporter = Reporter(config, mesh, self.saving, self.monitors, utilisation)

    def loop(self) -> None:
        """Runs step after step.

        Nothing here waits for the device but what comes only after some steps: reports, validations, saves.
        """
        self.reporter.start()
        while self.step < self.config.train.steps:
            self.step += 1
            batch = self.next_batch()
            self.train_step.begin(self.step)
            # of the global batch's loss; gradients are the global sums then
            share = self.train_step.forward_backward(batch)
            sums = self.train_step.sum_over_ranks(share, self.votes())
            self.saving.saver.hold_update()
            done = self.train_step.update(self.step, *sums)
            figures = [done.loss, *done.votes, done.grad_norm, done.skipped, *done.losses.values()]
            self.async_metrics.post(self.step, torch.stack(figures))
            self.reporter.count(batch)

            logging = self.due(self.config.log.every) or self.is_last
            # figures of the steps that the device has done
            arrived = self.async_metrics.take(all_of_them=logging)
            self.saving.look(failed=any(metrics.failures for metrics in arrived))
            if logging:
                self.report(arrived[-1], done.lr)
            if self.rolled_back(arrived):
                continue
            if any(metrics.stops for metrics in arrived) and not self.is_last:
                raise StopAgreed
            self.between_steps()

    def between_steps(self) -> None:
        """Validates and saves, where the step just done is one after which that is due."""
        options = self.config.checkpoint
        evaluating = self.due(self.config.train.eval_every) and not self.is_last
        saving = self.due(options.every) or (options.last and self.is_last)
        if not evaluating and not saving:
            return
        with self.reporter.aside():
            if evaluating:
                self.validate()
            if saving:
                self.save()
        if not self.is_last:
            self.check_stop()

    def due(self, every: int | None) -> bool:
        """Whether the step just done is one of every so many; 0 and None are never."""
        return every is not None and every > 0 and self.step % every == 0

    @property
    def is_last(self) -> bool:
        """Whether the step just done is the run's last."""
        return self.step == self.config.train.steps

    def next_batch(self) -> list[Microbatch]:
        """This rank's microbatches of the current step, which begins."""
        self.mesh.observers.tell(Observer.step_begins, self.step, self.due(self.config.log.every))
        self.mesh.observers.phase("data")
        return self.loader.step(self.step + self.ahead)

    def votes(self) -> tuple[float, float]:
        """This rank's votes: whether it must end, and whether its save under way has failed."""
        return float(self.must_end), float(self.saving.saver.failed)

    # A run, around its loop

    def run(self, asked: Callable[[], bool] | None = None) -> int:
        """Trains from the step after the last checkpoint to `train.steps`; returns the exit status.

        `asked`: whether somebody has asked this rank to stop.
        """
        self.asked = asked or self.asked
        try:
            status = self.train()
            self.engine.close()
            return status
        finally:
            self.loader.close()
            self.monitors.close()  # releases the terminal: a failure's reason comes last

    def train(self) -> int:
        """Runs all steps, or those up to a request to stop."""
        for line in self.opening:
            self.say(line)
        status = FINISHED
        try:
            self.check_stop()  # the file STOP may be there already
            self.loop()
            with self.mesh.observers.aside("saving"):  # whoever judges before a save does so at the end too
                self.saving.finish(last=True)
            self.conclude()
        except StopAgreed:
            self.save_at_end()
            status = STOPPED
        self.check_records()
        if status == STOPPED:
            self.say(f"stopped on request after step {self.step}; the same command resumes from there")
        return status

    # What is said

    def say(self, text: str) -> None:
        """Prints a line, once for the run."""
        if self.is_writer:
            print(text, flush=True)

    def report(self, metrics: StepMetrics, lr: float) -> None:
        """Logs a step that the device has done."""
        report = self.reporter.report(self.step, metrics, lr, self.saved_step)
        self.monitors.add_figures(report.figures, self.train_step.stages)
        if self.is_writer:
            stragglers = {"stragglers": list(report.stragglers)} if report.stragglers else {}
            self.monitors.tell(Monitor.record, report.figures | stragglers)
        self.monitors.tell(Monitor.report, report)

    def validate(self) -> float | None:
        """The mean loss in nats a token over the validation set, or over `eval_batches`
        batches of it; None without one.
        """
        if self.inputs.validation is None:
            return None
        with self.mesh.observers.aside("validation"), self.engine.evaluating():
            found = evaluate(
                self.config,
                self.train_step.runtime,
                self.mesh,
                self.inputs.validation,
                between=self.check_stop,
            )
        if not found.targets:
            self.say(
                f"step {self.step}: no validation loss: of what train.eval_batches reads, no token is learned"
            )
            return None
        loss = found.loss
        for monitor in self.monitors:
            monitor.validation(loss)
        if self.step > self.started and self.is_writer:  # else it is recorded already
            self.monitors.tell(Monitor.record, {"step": self.step, "valid_loss": loss})
        self.say(f"step {self.step}: validation loss {loss:.4f}")
        return loss

    def conclude(self) -> None:
        """Runs the last validation, and says where checkpoint and records are."""
        loss = self.validate()
        if loss is not None:
            entropy = self.inputs.unigram_entropy()
            beside = (
                ""
                if entropy is None
                else f"; {entropy:.4f} for a model that knows only how frequent each token is"
            )
            self.say(f"final validation loss {loss:.4f} nats a token{beside}")
        if self.latest is not None:
            self.say(f"checkpoint: {self.latest}")
        log = self.config.log
        self.say(
            f"records: {log.dir}/metrics.jsonl"
            + (f", and tensorboard --logdir {log.dir}" if log.tensorboard else "")
        )

    # Checkpoints

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint saved or resumed from."""
        return self.saving.latest or self.resumed

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this run saved or went on from; 0 without one."""
        return max(self.saving.latest_step, self.resumed_step)

    def save(self) -> None:
        """Saves a checkpoint of the step just done.

        Raises `CheckpointError` where machines share no folder for it, or where a layer has since it was
        built been given state that a checkpoint lacks.
        """
        folder = resolved(self.config.log.dir)
        if self.apart:
            raise CheckpointError(folder, f"nothing was saved: {self.apart}", SHARED)
        for stage in self.train_step.stages:
            if unsaved := unsaved_state(stage):
                wrong = f"nothing was saved: the model has got {unsaved[0]}, which no checkpoint saves"
                raise CheckpointError(folder, wrong, f"in the layer's constructor {SAVED_STATE}")
        samples = self.config.train.samples_through(self.step + self.ahead)
        with self.mesh.observers.aside("saving"):
            progress = {"samples": samples, "rollbacks": self.skips.rollbacks}
            self.saving.save(self.step, progress | self.passed_on)

    def resume(self) -> int:
        """Restores what `checkpoint.resume` names, or else the weights of `checkpoint.weights`, or draws
        some; returns the step to go on from.
        """
        checkpoint, step = choose(self.inputs, self.mesh), 0
        if checkpoint is None:
            self.train_step.draw()
        else:
            step = self.restore(*checkpoint)
        self.train_step.begin(step)  # where all steps are done, a validation still depends on the last one
        return step

    def restore(self, reader: Reader, weights_alone: bool = False) -> int:
        """Takes over a checkpoint's state, or only its weights. Returns its step, or 0."""
        if SPECIAL_TOKENS in reader.state:
            self.passed_on[SPECIAL_TOKENS] = reader.state[SPECIAL_TOKENS]
        tensors = self.engine.tensors()
        new = {
            key: piece
            for key, piece in tensors.items()
            if weights_alone and is_new(reader, logical_name(key))
        }
        self.train_step.draw_into(new)
        for key, (tensor, box) in tensors.items():
            if key not in new and (
                key.startswith((WEIGHTS, BUFFERS)) or not (weights_alone or key.startswith(STATE))
            ):
                self.mesh.observers.phase("reading a checkpoint")
                name = logical_name(key)
                # an average may begin here
                if name.startswith(AVERAGES) or (weights_alone and name.startswith(WEIGHTS)):
                    name = weights_of(reader, name.partition("/")[2])
                reader.read_into(name, box, tensor)
        # This also rounds the weights just read into the parameters that compute.
        self.engine.load_state(self.engine.state() if weights_alone else reader.state["engine"], tensors)
        if weights_alone:
            self.origin = reader.path
            return 0
        self.resumed, self.resumed_step = reader.path, reader.step
        self.recorded, self.residuals = recorded_sections(reader), read_residuals(reader, tensors)
        self.skips.restore(reader.state["engine"]["skipped"], reader.state["rollbacks"])
        self.ahead = self.config.train.batches_in(reader.state["samples"]) - reader.step
        return reader.step

    # Recovery

    def rolled_back(self, arrived: list[StepMetrics]) -> bool:
        """Reports the samples of skipped steps.

        After too many skips in a row the run goes back to its last checkpoint, and continues there with
        samples that it has not read yet. Returns whether it went back.
        """
        for metrics in arrived:
            if self.skips.saw(metrics):
                self.report_skipped(metrics)
        if not self.skips.too_many():
            return False
        # steps done meanwhile; their samples are passed over too
        for metrics in self.async_metrics.take(all_of_them=True):
            self.report_skipped(metrics)
        self.saving.finish()
        if self.saved_step == 0:
            raise TooManySkips(
                f"{self.skips.limit} steps in a row were skipped, and there is no checkpoint to go back to"
            )
        before, batch = self.step, self.step + self.ahead
        if self.is_writer:
            self.inputs.look_again(self.resumed, self.resumed_step)
        self.step = self.resume()
        self.ahead = batch - self.step
        if self.is_writer:
            self.monitors.tell(Monitor.reopen, self.step + 1)
        first = self.config.train.samples_through(batch)
        self.say(f"after step {before} back to {self.resumed}, and on with sample {first}")
        return True

    def report_skipped(self, metrics: StepMetrics) -> None:
        """Records a step that was skipped, and its samples."""
        number, train = metrics.step + self.ahead, self.config.train
        samples = {
            "first_sample": train.samples_through(number - 1),
            "last_sample": train.samples_through(number) - 1,
        }
        record = {"step": metrics.step, **samples}
        if self.is_writer:
            self.monitors.tell(
                Monitor.skipped, record | {"loss": metrics.loss, "grad_norm": metrics.grad_norm}
            )

    # Stopping

    @property
    def must_end(self) -> bool:
        """Whether this rank was asked to stop, or can no longer record what the run does."""
        return self.asked() or bool(self.monitors.broken)

    def check_stop(self) -> None:
        """Raises `StopAgreed` on all ranks if any rank must end. Waits for the device."""
        vote = torch.tensor(float(self.must_end), dtype=torch.float64, device=self.mesh.device)
        if all_reduce(vote, self.mesh.world).item():
            raise StopAgreed

    def save_at_end(self) -> None:
        """Makes sure that a checkpoint of the step just done is on disk."""
        self.saving.finish()
        if self.step != self.saved_step:
            self.save()
        self.saving.finish(last=True)

    def check_records(self) -> None:
        """If the run's records could not be written, saves a checkpoint and raises
        `LogError` on all ranks.
        """
        reason = Ranks(self.mesh).first(self.monitors.broken)
        if reason:
            self.save_at_end()
            right = f"make room, or see to its folder; the same command resumes from step {self.step}"
            raise LogError(f"{self.config.log.dir}/metrics.jsonl", f"cannot be written: {reason}", right)
