"""The training loop of every run. Read next: `step.py` for what a step is, `run.py` for how the parts are made."""

from openpi_train.parallel.state import TrainState
from openpi_train.runtime import preempt
from openpi_train.runtime.preempt import StoppedError
from openpi_train.training.guard import no_implicit_transfers
from openpi_train.training.run import Run
from openpi_train.training.stopping import stop_after


def train(run: Run) -> TrainState:
    """Take the run from its state's step to its last one. Every process must call it. Returns the final state.

    Raises Preempted after a good save where the processes agreed to stop, NumbersError on a NaN or Inf update.
    """
    state, experiment, recorder = run.state, run.experiment, run.recorder
    first, total = int(state.step), experiment.num_train_steps
    run.catch_up(state)
    step_function, save_is_due, saved = run.compile_step(state), False, first
    for step in range(first + 1, total + 1):
        with run.taking(step):
            try:
                batch = run.feed.next(state)  # it may use the current parameters, so it is not guarded
            except StoppedError:
                stop_after(run, step - 1, state, is_saved=saved == step - 1)
            with no_implicit_transfers():
                state, metrics = step_function(state, batch)
                run.note(step, metrics)
                stop, evaluate = run.stop_requested(), run.evaluation_is_due(step)
                if stop or evaluate or step % experiment.log_interval == 0:
                    run.log(step, recorder.read())
        complete = step == total
        if evaluate and not stop:
            with recorder.paused("evaluation"):
                complete &= run.evaluate(step, state)
            stop = run.stop_requested()
        elif evaluate:
            complete = False
        save_is_due |= stop or run.save_is_due(step)
        can_be_saved = step == total or run.feed.can_be_saved
        if stop and can_be_saved:
            preempt.note_stopped()
        if save_is_due and can_be_saved:
            recorder.check()
            with recorder.paused("checkpoint"):
                if run.save(step, state, is_last=stop or step == total):
                    saved = step
            save_is_due = False
        elif run.local_save_is_due(step) and can_be_saved:
            recorder.check()
            with recorder.paused("checkpoint"):
                run.save_locally(step, state)
        if stop and can_be_saved and not complete:
            stop_after(run, step, state, is_saved=True)
    run.finish()
    return state
