"""The training loop, from a checked config and a mesh to a trained model."""

from contextlib import nullcontext
from math import prod
from pathlib import Path

import torch

from megacore.checkpoint import Ranks, Reader
from megacore.checkpoint.commit import set_aside
from megacore.checkpoint.weights import WEIGHTS
from megacore.config import Config
from megacore.config.resolve_auto import why_whole
from megacore.config.schema import resolved
from megacore.distributed.collectives import all_gather, all_reduce
from megacore.distributed.mesh import Mesh
from megacore.distributed.shard import logical_name, shard_of
from megacore.errors import CheckpointError, ConfigError, LogError
from megacore.pipeline.generators import GENERATORS, generated
from megacore.pipeline.partition import placement_of, stage_layers
from megacore.pipeline.runtime import Microbatch
from megacore.tools.monitoring.prometheus import Exporter
from megacore.train.async_metrics import AsyncMetrics, StepMetrics
from megacore.train.compiling import settled
from megacore.train.drift import Drifted
from megacore.train.evaluation import evaluate
from megacore.train.garbage import Garbage
from megacore.train.inputs import Inputs
from megacore.train.loader import Loader
from megacore.train.lock import apart_from_owner
from megacore.train.logs import Logs
from megacore.train.meters import PairsSeen, StepParts, StepTimer, Utilisation, peak_memory, reserved_memory
from megacore.train.restoring import choose, engine_state
from megacore.train.saving import Saving
from megacore.train.skip_policy import Skips, TooManySkips
from megacore.train.step import TrainStep
from megacore.train.stopping import StopAgreed, StopRequest


class Watch:
    """Answers the trainer's questions about waiting and stragglers. This one knows nothing; `tools/diagnosis/noting.py` replaces it."""

    def waited(self) -> float:
        """Seconds that this rank waited for others since this was asked last."""
        return 0.0

    def worked(self) -> float:
        """Seconds that this rank's GPU took for forwards and backwards since this was asked last; 0 without a GPU."""
        return 0.0

    def waits(self) -> dict[str, float]:
        """Seconds that this rank's host waited since this was asked last, by the name of a group, and for data."""
        return {}

    def device_waits(self) -> dict[str, float]:
        """Seconds that its GPU stood waiting in the last logged step, by the name of a group."""
        return {}

    def stragglers(self, own: list[float], devices: list[float], seconds: float) -> dict[int, float]:
        """The ranks that hold up all others' steps of `seconds`, by their `own` seconds a step and those of their `devices`."""
        return {}


SHARED = "a folder that all machines share; or checkpoint.every=0 checkpoint.last=false, which saves nothing"
FINISHED, STOPPED = 0, 75  # exit statuses; 75 asks a scheduler to start the job again


class Trainer:
    """One rank's part in a run. Construction and every method are collective over all ranks."""

    def __init__(self, config: Config, mesh: Mesh, inputs: Inputs, exporter: Exporter | None = None) -> None:
        config, self.compile_choice = settled(config, mesh, inputs.opened if inputs.checkpoint else None)
        self.config, self.mesh, self.inputs = config, mesh, inputs
        self.exporter = exporter or Exporter(None, mesh.place, mesh.device)
        if config.log.prometheus_port is not None:
            self.exporter.watch(mesh.machine_ranks())
        self.is_writer = mesh.place.rank == 0
        self.apart = apart_from_owner(Path(resolved(config.log.dir)), mesh)
        if self.apart and (config.checkpoint.every or config.checkpoint.last):
            raise ConfigError("log.dir", self.apart, SHARED)

        self.train_step = TrainStep(config, mesh, draw=False)
        self.engine = self.train_step.engine
        self.loader = Loader(config, mesh, inputs.stream)
        self.resumed: Path | None = None  # the checkpoint that this run went on from, and its step
        self.resumed_step = 0
        self.origin: Path | None = None  # the checkpoint that gave the first weights
        self.stop = StopRequest()
        self.ahead = 0  # batches of samples that a run has skipped by going back and around bad ones
        self.skips = Skips(config.optim.max_skips, config.optim.max_rollbacks)
        self.step = self.started = self.resume()
        if self.is_writer and config.checkpoint.resume != "auto":
            set_aside(Path(resolved(config.log.dir)) / "checkpoints", self.step)
        self.watch = Watch()
        self.async_metrics = AsyncMetrics(mesh.device)
        self.logs = Logs(config, self.is_writer, self.step + 1)
        self.saving = Saving(config, mesh, self.engine, self.logs)
        self.utilisation = Utilisation(config, mesh.device, mesh.place.world_size)
        self.pairs = PairsSeen()
        self.parts = StepParts(config, mesh)

    def run(self, stop: StopRequest | None = None) -> int:
        """Trains from the step after the last checkpoint to `train.steps`; returns the exit status.

        `stop`: a `StopRequest` that is entered already, if there is one.
        """
        self.stop = stop or self.stop
        try:
            with self.stop if stop is None else nullcontext():
                status = self.train()
                self.engine.close()
            return status
        finally:
            self.loader.close()
            self.exporter.close()
            self.logs.close()  # releases the terminal: a failure's reason comes last

    def train(self) -> int:
        """Runs all steps, or those up to a request to stop."""
        self.greet()
        status = FINISHED
        try:
            self.check_stop()  # a request during start-up
            with Garbage() as garbage:
                self.loop(garbage)
            self.saving.finish(last=True)
            self.conclude()
        except StopAgreed:
            self.save_at_end()
            status = STOPPED
        self.check_records()
        if status == STOPPED:
            self.logs.say(f"stopped on request after step {self.step}; the same command goes on from there")
        return status

    def save_at_end(self) -> None:
        """Makes sure that a checkpoint of the step just done is on disk."""
        self.saving.finish()
        if self.step != self.saved_step:
            self.save()
        self.saving.finish(last=True)

    def check_records(self) -> None:
        """If the run's records could not be written, saves a checkpoint and raises `LogError` on all ranks."""
        reason = Ranks(self.mesh).first(self.logs.broken)
        if reason:
            self.save_at_end()
            right = f"make room, or see to its folder; the same command goes on from step {self.step}"
            raise LogError(f"{self.config.log.dir}/metrics.jsonl", f"cannot be written: {reason}", right)

    def loop(self, garbage: Garbage) -> None:
        """Runs step after step. Reports, validations and saves wait for the device, so they come only after some steps."""
        config, train = self.config, self.config.train
        self.timer, runtime = StepTimer(), self.train_step.runtime
        if self.is_writer:  # until the first step is done nothing else tells how long a step takes
            runtime.after_backward = self.logs.within(
                self.step + 1, config.num_microbatches * len(self.train_step.stages), self.mesh.device.type
            )
        while self.step < train.steps:
            self.step += 1
            batch = self.next_batch()
            done = self.train_step(self.step, batch, self.votes, self.saving.saver.hold_update)
            runtime.after_backward = None
            self.async_metrics.post(self.step, torch.stack([done.loss, *done.votes, done.grad_norm, done.skipped, done.drifted]))
            self.timer.steps += 1
            self.pairs.add(batch)
            garbage.step()

            last = self.step == train.steps
            logging = self.step % config.log.every == 0 or last
            due = self.async_metrics.take(all_of_them=logging)
            self.saving.look(failed=any(figures.failures for figures in due))
            if logging:
                self.report(due[-1], done.lr)
            self.check_drift(due)
            if self.rolled_back(due):
                continue
            if any(figures.stops for figures in due) and not last:
                raise StopAgreed
            evaluating = train.eval_every and self.step % train.eval_every == 0 and not last
            saving = (config.checkpoint.every and self.step % config.checkpoint.every == 0) or (config.checkpoint.last and last)
            with self.timer.aside(self.mesh.device) if evaluating or saving else nullcontext():
                if evaluating:
                    self.validate()
                if saving:
                    self.save()
            if (evaluating or saving) and not last:
                self.check_stop()

    def check_drift(self, due: list[StepMetrics]) -> None:
        """Raises `Drifted` on all ranks if parameters differ that tensor ranks hold alike; where that may be no fault, it says so once."""
        drift = self.train_step.drift
        for figures in due:
            if figures.drifted and not drift.told:
                found = f"parameters that tensor ranks hold alike have drifted apart, seen in step {figures.step}: {drift.named()}"
                if drift.is_fault:
                    raise Drifted(found)
                drift.told = True
                self.logs.say(f"WARNING: {found}; NCCL may have added up gradients in another order for each, so training goes on")

    def check_stop(self) -> None:
        """Raises `StopAgreed` on all ranks if any rank must end. Waits for the device."""
        vote = torch.tensor(float(self.must_end), dtype=torch.float64, device=self.mesh.device)
        if all_reduce(vote, self.mesh.world).item():
            raise StopAgreed

    @property
    def must_end(self) -> bool:
        """Whether this rank was asked to stop, or can no longer record what the run does."""
        return self.stop.requested or bool(self.logs.broken)

    def rolled_back(self, due: list[StepMetrics]) -> bool:
        """Reports the samples of skipped steps. After too many skips in a row the run goes back to its last checkpoint, and continues
        there with samples that it has not read yet. Returns whether it went back.
        """
        batch_size = self.config.train.global_batch_size
        for figures in due:
            if self.skips.saw(figures):
                first = (figures.step - 1 + self.ahead) * batch_size
                self.logs.skipped(figures, first, first + batch_size - 1)
        if not self.skips.too_many():
            return False
        for figures in self.async_metrics.take(all_of_them=True):  # steps done meanwhile; their samples are passed over too
            first = (figures.step - 1 + self.ahead) * batch_size
            self.logs.skipped(figures, first, first + batch_size - 1)
        self.saving.finish()
        if self.saved_step == 0:
            raise TooManySkips(f"{self.skips.limit} steps in a row were skipped, and there is no checkpoint to go back to")
        before, batch = self.step, self.step + self.ahead
        if self.is_writer:
            self.inputs.look_again(self.resumed, self.resumed_step)
        self.step = self.resume()
        self.ahead = batch - self.step
        self.logs.reopen(self.step + 1)
        self.logs.say(f"after step {before} back to {self.resumed}, and on with sample {batch * batch_size}")
        return True

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this run saved or went on from; 0 without one."""
        return max(self.saving.latest_step, self.resumed_step)

    def next_batch(self) -> list[Microbatch]:
        """This rank's microbatches of the current step."""
        return self.loader.step(self.step + self.ahead)

    def votes(self) -> tuple[float, float]:
        """This rank's votes: whether it must end, and whether its save under way has failed."""
        return float(self.must_end), float(self.saving.saver.failed)

    def greet(self) -> None:
        """Says what is about to run, in a few lines."""
        config, train = self.config, self.config.train
        data = self.mesh.sample_group.size
        own = {p for stage in self.train_step.stages for p in stage.parameters()}
        parameters = sum(prod(shard_of(p).local_shape) for p in own)  # an engine may hold some elsewhere
        self.logs.say(f"mesh: {self.mesh.describe()}")
        self.logs.say(
            f"batch: global_batch_size {train.global_batch_size} = micro_batch_size {train.micro_batch_size}"
            f" × microbatches {config.num_microbatches} × data {data}"
        )
        for line in self.inputs.stream.packed():
            self.logs.say(line)
        schedule = config.parallel.schedule
        if schedule in GENERATORS and generated(schedule, 1, 1).splits and (why := why_whole(config)):
            self.logs.say(f"{schedule} runs with whole backwards, which {why}")
        held = (stage_layers(config)[stage] for stage in placement_of(config)[0])
        layers = " and ".join(f"{layers.start}–{layers.stop - 1}" for layers in held)
        self.logs.say(f"rank 0 holds layers {layers}, {parameters:,} parameters in {train.precision}")
        if self.compile_choice:
            self.logs.say(self.compile_choice)
        if self.apart:
            self.logs.say(f"WARNING: {self.apart}: this run can save no checkpoint, not even when it is asked to stop")
        if self.step == train.steps:
            self.logs.say(f"all {train.steps} steps are done already (checkpoint.resume=never trains anew)")
        elif self.step:
            self.logs.say(f"resumed after step {self.step} of {train.steps}")
        elif self.origin:
            self.logs.say(f"starting from the weights of {self.origin}")

    def report(self, figures: StepMetrics, lr: float) -> None:
        """Logs a step that the device has done."""
        steps = self.timer.steps
        seconds = self.timer.read()
        own, worked = seconds - self.watch.waited() / steps, self.watch.worked() / steps
        parts = self.parts.of(worked or own, self.watch.waits(), steps, self.watch.device_waits())
        memory = peak_memory(self.mesh.device), reserved_memory(self.mesh.device)
        of_all = self.told_by_all([seconds, own, worked, self.saving.read_seconds(), *memory, self.pairs.read(), *parts])
        seconds, _, _, save_seconds, used, reserved, *_ = of_all.amax(1).tolist()
        tokens_a_step = self.config.train.global_batch_size * self.config.train.seq_len
        speed, pairs = tokens_a_step / seconds, float(of_all[6].mean())  # data ranks have equally many tokens and ranks
        stragglers = self.watch.stragglers(of_all[1].tolist(), of_all[2].tolist(), seconds)
        logged = {
            "step": self.step,
            "loss": figures.loss,
            "grad_norm": figures.grad_norm,
            "lr": lr,
            "tokens": self.step * tokens_a_step,
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "mfu": self.utilisation.full(speed, pairs),
            "mfu_causal": self.utilisation.causal(speed, pairs),
            "save_seconds": save_seconds,
            "memory_bytes": int(used),
            "memory_reserved_bytes": int(reserved),
            "skipped": int(figures.skipped),
        }
        self.logs.step(logged, stragglers)
        by_rank = {
            "rank_busy_seconds": of_all[1].tolist(),
            "rank_waiting_seconds": (of_all[0] - of_all[1]).tolist(),
            "rank_memory_bytes": of_all[4].tolist(),
            "rank_memory_reserved_bytes": of_all[5].tolist(),
            "rank_straggler": [float(rank in stragglers) for rank in range(of_all.shape[1])],
        }
        by_part = dict(zip(self.parts.names, of_all[7:].tolist(), strict=True))
        self.exporter.step(logged, by_rank, by_part, self.saved_step, self.saving.took)

    def told_by_all(self, own: list[float]) -> torch.Tensor:
        """Every rank's numbers, fp64 ``[number, rank]`` on the host. Collective; nothing else of a report waits for the device."""
        return all_gather(torch.tensor([own], dtype=torch.float64, device=self.mesh.device), self.mesh.world).cpu().T

    def validate(self) -> float | None:
        """The mean loss in nats a token over the validation set, or over `eval_batches` batches of it; None without one."""
        if self.inputs.validation is None:
            return None
        found = evaluate(self.config, self.train_step.runtime, self.mesh, self.inputs.validation, between=self.check_stop)
        if not found.targets:
            self.logs.say(f"step {self.step}: no validation loss: of what train.eval_batches reads, no token is learned")
            return None
        loss = found.loss
        self.exporter.validation(loss)
        if self.step > self.started:  # else it is recorded already
            self.logs.validation(self.step, loss)
        self.logs.say(f"step {self.step}: validation loss {loss:.4f}")
        return loss

    def conclude(self) -> None:
        """Runs the last validation, and says where checkpoint and records are."""
        loss = self.validate()
        if loss is not None:
            entropy = self.inputs.unigram_entropy()
            beside = "" if entropy is None else f"; {entropy:.4f} for a model that knows only how frequent each token is"
            self.logs.say(f"final validation loss {loss:.4f} nats a token{beside}")
        if self.latest is not None:
            self.logs.say(f"checkpoint: {self.latest}")
        self.logs.say(f"records: {self.config.log.dir}/metrics.jsonl, and tensorboard --logdir {self.config.log.dir}")

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint saved or resumed from."""
        return self.saving.latest or self.resumed

    def save(self) -> None:
        """Saves a checkpoint of the step just done. Raises `CheckpointError` where machines share no folder for it."""
        if self.apart:
            raise CheckpointError(resolved(self.config.log.dir), f"nothing was saved: {self.apart}", SHARED)
        samples = (self.step + self.ahead) * self.config.train.global_batch_size
        self.saving.save(self.step, {"samples": samples, "rollbacks": self.skips.rollbacks})

    def resume(self) -> int:
        """Restores what `checkpoint.resume` names, or else the weights of `checkpoint.weights`, or draws some; returns the step to go
        on from."""
        found = choose(self.inputs, self.mesh)
        if found is None:
            self.train_step.draw()
            return 0
        return self.restore(*found)

    def restore(self, reader: Reader, weights_alone: bool = False) -> int:
        """Takes over a checkpoint's state, or only its weights. Returns its step, or 0."""
        tensors = self.engine.tensors()
        for key, (tensor, box) in tensors.items():
            if not weights_alone or key.startswith(WEIGHTS):
                self.mesh.progress("reading a checkpoint")
                reader.read_into(logical_name(key), box, tensor)
        # This also rounds the weights just read into the parameters that compute.
        self.engine.load_state(self.engine.state() if weights_alone else engine_state(reader), tensors)
        if weights_alone:
            self.origin = reader.path
            return 0
        self.resumed, self.resumed_step = reader.path, reader.step
        self.skips.restore(reader.state["engine"]["skipped"], reader.state.get("rollbacks", 0))  # which older checkpoints do not have
        self.ahead = reader.state["samples"] // self.config.train.global_batch_size - reader.step
        return reader.step
