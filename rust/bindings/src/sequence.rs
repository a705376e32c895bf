//! `kvpager.Sequence`: a handle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvpager_core::evict::Departure;
use kvpager_core::ids::{BlockId, Handle};
use kvpager_core::memory::with_capacity;
use kvpager_core::pager::FORK_MAX;
use kvpager_core::sequence::State;
use kvpager_core::{Error, Pager};
use numpy::PyArray1;
use pyo3::exceptions::{PyResourceWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::{Given, POSITION, wrong_type};
use crate::errors::{shown, to_python};
use crate::namespace;
use crate::plans::{Made, Told};
use crate::shared::{Dropped, Shared, none_if_full};
use crate::tokens::{Tokens, token};

/// One running request: its tokens, its block table, and how much of it is computed.
///
/// Made by `Pager.admit` and `fork`. Positions: `num_cached <= num_committed <= num_planned <= len(seq)`. Release it
/// (or use it in a `with` statement): a handle that the garbage collector takes is released at the next call that
/// changes the pager and reported as a ResourceWarning.
#[pyclass(frozen, name = "Sequence", module = "kvpager", freelist = 256)]
pub struct PySequence {
    shared: Arc<Shared>,
    handle: Handle,
    released: AtomicBool,
}

impl PySequence {
    pub fn new(shared: &Arc<Shared>, handle: Handle) -> Self {
        Self { shared: Arc::clone(shared), handle, released: AtomicBool::new(false) }
    }

    /// An argument, or what is wrong with it; but first comes whether the sequence allows the call at all.
    fn checked<T>(&self, py: Python<'_>, call: &'static str, argument: PyResult<T>) -> PyResult<T> {
        argument.or_else(|error| {
            self.shared.change(py, |pager| pager.running(self.handle, call).map(|_| ()))?;
            Err(error)
        })
    }

    fn end(&self, py: Python<'_>, departure: Departure) -> PyResult<()> {
        self.shared.change(py, |pager| {
            pager.release(self.handle, departure);
            self.released.store(true, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Does the handle know that its sequence was released?
    fn is_released(&self) -> bool {
        if self.shared.was_released(self.handle) {
            self.released.store(true, Ordering::Relaxed);
        }
        self.released.load(Ordering::Relaxed)
    }

    /// How a release's `reason` names it. Once the sequence is released, nothing is asked any more.
    fn departure(&self, reason: &Given<'_>) -> PyResult<Departure> {
        let Some(reason) = reason.get().filter(|_| !self.is_released()) else {
            return Ok(Departure::Finished);
        };
        let Ok(name) = reason.cast::<PyString>() else { return Err(wrong_type(reason, "reason", "a str")) };
        match name.to_str() {
            Ok("finished") => Ok(Departure::Finished),
            Ok("aborted") => Ok(Departure::Aborted),
            _ => {
                let message = format!("reason is {}; it must be \"finished\" or \"aborted\"", shown(reason)?);
                Err(PyValueError::new_err(message))
            }
        }
    }

    fn position(
        &self,
        py: Python<'_>,
        call: &'static str,
        read: impl FnOnce(&kvpager_core::sequence::Sequence) -> usize,
    ) -> PyResult<usize> {
        self.read(py, |pager| Ok(read(pager.sequence(self.handle, call)?)))
    }

    /// Reads of the sequence, whose row in a batch may know more of it.
    fn read<R>(&self, py: Python<'_>, call: impl FnOnce(&Pager) -> Result<R, Error>) -> PyResult<R> {
        self.shared.look(py, |pager| {
            pager.flush_row(self.handle);
            call(pager)
        })
    }

    /// The handle, and whether it is of this pager.
    pub fn handle_of(&self, shared: &Arc<Shared>) -> (Handle, bool) {
        (self.handle, Arc::ptr_eq(&self.shared, shared))
    }

    /// The handle, for a call of the same pager.
    pub fn handle_in(&self, py: Python<'_>, shared: &Arc<Shared>, call: &'static str) -> PyResult<Handle> {
        if Arc::ptr_eq(&self.shared, shared) {
            return Ok(self.handle);
        }
        self.shared.read(py, |pager| pager.running(self.handle, call).map(|_| ()))?;
        Err(PyValueError::new_err(format!("sequence {} belongs to another pager", self.handle.serial)))
    }
}

#[pymethods]
impl PySequence {
    /// Number of the sequence, counted over the life of the pager and never used again.
    #[getter]
    fn id(&self) -> u64 {
        self.handle.serial
    }

    /// "running", "preempted" or "released"; with host blocks also "fetching" (see `fetch`), "swapping_out", "swapped" or
    /// "swapping_in".
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.shared.read(py, |pager| {
            Ok(pager.sequence(self.handle, "state").map_or("released", |sequence| sequence.state.name()))
        })
    }

    /// Tokens found cached at admission: skip these in prefill. A multiple of `block_size`, and less than len(seq): the
    /// last token is always computed. 0 while preempted.
    #[getter]
    fn num_cached(&self, py: Python<'_>) -> PyResult<usize> {
        self.position(py, "num_cached", |sequence| sequence.num_cached as usize)
    }

    /// Tokens whose KV the caller has said is written.
    #[getter]
    fn num_committed(&self, py: Python<'_>) -> PyResult<usize> {
        self.position(py, "num_committed", |sequence| sequence.num_committed)
    }

    /// Tokens given to a step that is to write them; those committed, if no open step names the sequence.
    #[getter]
    fn num_planned(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |pager| Ok(pager.num_planned(pager.sequence(self.handle, "num_planned")?)))
    }

    /// A handle is true, whatever became of its sequence: `if seq := pager.try_admit(prompt)`.
    #[expect(clippy::unused_self, reason = "Python calls it on a handle")]
    fn __bool__(&self) -> bool {
        true
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.position(py, "len", |sequence| sequence.len)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let id = self.handle.serial;
        self.read(py, |pager| {
            Ok(pager.sequence(self.handle, "repr").map_or_else(
                |_| format!("<kvpager.Sequence {id}: released>"),
                |sequence| {
                    format!(
                        "<kvpager.Sequence {id}: {}, {} tokens, {} committed>",
                        sequence.state.name(),
                        sequence.len,
                        sequence.num_committed
                    )
                },
            ))
        })
    }

    /// How often it gave its blocks back to come back later, preempted or swapped; a fork starts with its parent's number.
    #[getter]
    fn num_preemptions(&self, py: Python<'_>) -> PyResult<u32> {
        self.shared.read(py, |pager| Ok(pager.sequence(self.handle, "num_preemptions")?.num_preemptions))
    }

    /// The namespace given at admission.
    #[getter]
    fn namespace<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let encoded =
            self.shared.read(py, |pager| Ok(pager.namespace(pager.sequence(self.handle, "namespace")?).to_vec()))?;
        namespace::decode(py, &encoded)
    }

    /// Admitted with `pin=True`?
    #[getter]
    fn pinned(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.read(py, |pager| Ok(pager.sequence(self.handle, "pinned")?.pinned))
    }

    /// The block table: int32, physical block of each logical block: one for each `block_size` tokens. (The token that
    /// a step's commit added last gets its block from the next step; `Batch.reserve` gives blocks ahead.) A copy.
    /// StaleHandle while the sequence holds no blocks of the device: preempted, or swapped.
    #[getter]
    fn block_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let ids = self.read(py, |pager| {
            let table = &pager.on_device(self.handle, "block_ids")?.table;
            let mut ids = with_capacity(table.len())?;
            ids.extend(table.iter().copied().map(BlockId::cast_signed));
            Ok(ids)
        })?;
        Ok(PyArray1::from_vec(py, ids))
    }

    /// The plan that a sequence in state "fetching" waits for, to be copied by whoever comes first: others may wait for the
    /// same one. None in every other state. A new object at each call, equal to the others.
    #[getter]
    fn fetch<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let told = self.shared.read(py, |pager| {
            let sequence = pager.sequence(self.handle, "fetch")?;
            let plan = sequence.plan.filter(|_| sequence.state == State::Fetching);
            plan.and_then(|plan| pager.find_plan(plan).transpose()).transpose()?.map(Told::of).transpose()
        })?;
        told.map(|told| told.build(py)).transpose()
    }

    /// The tokens: int32 [len], -1 where a step has planned a position whose token is not known yet. A copy.
    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let tokens = self.read(py, |pager| {
            let sequence = pager.sequence(self.handle, "tokens")?;
            let mut tokens = with_capacity(sequence.len)?;
            pager.copy_tokens(sequence, &mut tokens);
            Ok(tokens)
        })?;
        Ok(PyArray1::from_iter(py, tokens.into_iter().map(u32::cast_signed)))
    }

    /// One more token; returns its slot, `block_id * block_size + offset`, which is writable: a shared block is
    /// replaced first (see `take_copies`). Raises TokenError, TokenTypeError, StaleHandle, and OutOfBlocks if a block
    /// is needed and there is none; nothing was changed then.
    ///
    /// Growth never raises NeverFits: a sequence that fills the whole pool gets OutOfBlocks for its next block even
    /// when it is alone. Release it as aborted then; preempted and resumed, it would stand there again.
    fn append(&self, py: Python<'_>, token: &Bound<'_, PyAny>) -> PyResult<i64> {
        let token = self.checked(py, "append", self::token(token, None))?;
        self.shared.change(py, |pager| pager.append(self.handle, token))
    }

    /// As `append`, but None where that raises OutOfBlocks. Compare with `is None`: slot 0 is a slot, and false.
    fn try_append(&self, py: Python<'_>, token: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
        let token = self.checked(py, "append", self::token(token, None))?;
        self.shared.change(py, |pager| none_if_full(pager.append(self.handle, token)))
    }

    /// More tokens, all or nothing; returns their slots, int64 [len(tokens)]. Errors as `append`; no NeverFits either.
    fn extend<'py>(&self, py: Python<'py>, tokens: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let tokens = self.checked(py, "extend", Tokens::from_any(tokens))?;
        let slots = self.shared.change_with(py, &tokens, |pager, tokens| pager.extend(self.handle, tokens))?;
        Ok(PyArray1::from_vec(py, slots))
    }

    /// As `extend`, but None where that raises OutOfBlocks. Compare with `is None`: an array has no one truth value.
    fn try_extend<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        let tokens = self.checked(py, "extend", Tokens::from_any(tokens))?;
        let slots =
            self.shared.change_with(py, &tokens, |pager, tokens| none_if_full(pager.extend(self.handle, tokens)))?;
        Ok(slots.map(|slots| PyArray1::from_vec(py, slots)))
    }

    /// Slots of positions start..stop-1, int64 [stop - start], made writable: for the prefill of
    /// `slots(seq.num_committed, len(seq))` or of a chunk of it. ValueError unless `num_committed <= start <= stop <=
    /// len(seq)`: what is committed is never written again. OutOfBlocks if shared blocks cannot be replaced; nothing
    /// was changed then.
    fn slots<'py>(&self, py: Python<'py>, start: Given<'py>, stop: Given<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let start = self.checked(py, "slots", start.position("start", 0, POSITION))?;
        let stop = self.checked(py, "slots", stop.position("stop", 0, POSITION))?;
        let slots = self.shared.change(py, |pager| pager.slots(self.handle, start, stop))?;
        Ok(PyArray1::from_vec(py, slots))
    }

    /// As `slots`, but None where that raises OutOfBlocks. Compare with `is None`: an array has no one truth value.
    fn try_slots<'py>(
        &self,
        py: Python<'py>,
        start: Given<'py>,
        stop: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        let start = self.checked(py, "slots", start.position("start", 0, POSITION))?;
        let stop = self.checked(py, "slots", stop.position("stop", 0, POSITION))?;
        let slots = self.shared.change(py, |pager| none_if_full(pager.slots(self.handle, start, stop)))?;
        Ok(slots.map(|slots| PyArray1::from_vec(py, slots)))
    }

    /// Say that the KV of all positions below `end` (default: all) is written, earlier uncommitted ones included
    /// (`append` gives the slot of its own token only): call it after the kernel. Full blocks become findable by
    /// other prompts, and never change again. Monotone: an `end` below `num_committed` does nothing. ValueError past
    /// `len(seq)`.
    #[pyo3(signature = (end=None))]
    fn commit(&self, py: Python<'_>, end: Option<Given<'_>>) -> PyResult<()> {
        let end = self.checked(py, "commit", end.map(|end| end.position("end", 0, POSITION)).transpose())?;
        self.shared.change(py, |pager| pager.commit(self.handle, end))
    }

    /// n children that share every block: parallel samples, beams. Commit first: what is not committed is not copied
    /// on write, so that each child has to compute it again. Takes no block; the first write to a shared block
    /// replaces it. Returns a list of Sequences. ValueError unless 1 <= n <= 65,536 and, for more than one child,
    /// n * len(seq) <= 2**28. Cost for each child: the length of the table and of the tokens that are not published.
    #[pyo3(signature = (n=Given::NOTHING), text_signature = "($self, n=1)")]
    fn fork(&self, py: Python<'_>, n: Given<'_>) -> PyResult<Vec<Self>> {
        let n = self.checked(py, "fork", n.position("n", 1, "1 to 65536"))?;
        // Asked for before there are children that nobody could name.
        let mut children = with_capacity(n.min(FORK_MAX)).map_err(|error| to_python(py, error))?;
        let handles = self.shared.change(py, |pager| pager.fork(self.handle, n))?;
        children.extend(handles.into_iter().map(|handle| Self::new(&self.shared, handle)));
        Ok(children)
    }

    /// Keep the first `num_tokens` tokens (rejected drafts). ValueError unless 1 <= `num_tokens` <= len(seq). A
    /// published block that the cut goes through stays in the table, shared and partial: the next write copies it.
    fn truncate(&self, py: Python<'_>, num_tokens: Given<'_>) -> PyResult<()> {
        let len = self.checked(py, "truncate", num_tokens.position("num_tokens", 0, "1 to the sequence's length"))?;
        self.shared.change(py, |pager| pager.truncate(self.handle, len))
    }

    /// Give all blocks back; committed full blocks stay cached. The handle and the tokens stay: `resume` admits them
    /// again. Slots that this sequence was given and has not committed are void from now on, those of the present
    /// step included: their blocks may belong to another sequence at the next call, so no kernel may write to them.
    /// `reason` (200 characters at most) and `cost` (0 or more) are for `Pager.preemptions`: those of a Victim, say.
    #[pyo3(
        signature = (*, reason=Given::NOTHING, cost=Given::NOTHING),
        text_signature = "($self, *, reason='', cost=0.0)"
    )]
    fn preempt(&self, py: Python<'_>, reason: Given<'_>, cost: Given<'_>) -> PyResult<()> {
        let why = self.checked(py, "preempt", reason.why(&cost))?;
        self.shared.change(py, |pager| pager.preempt(self.handle, why))
    }

    /// Admit a preempted or swapped sequence again, all or nothing; returns the sequence. What was committed and is not cached
    /// any more is to be computed again (from `num_cached` on), and is counted. Raises OutOfBlocks, and StaleHandle
    /// unless it is preempted or swapped.
    fn resume(slf: PyRef<'_, Self>, py: Python<'_>) -> PyResult<Py<Self>> {
        slf.shared.change(py, |pager| pager.resume(slf.handle))?;
        Ok(slf.into())
    }

    /// As `resume`, but None where that raises OutOfBlocks.
    fn try_resume(slf: PyRef<'_, Self>, py: Python<'_>) -> PyResult<Option<Py<Self>>> {
        let resumed = slf.shared.change(py, |pager| none_if_full(pager.resume(slf.handle)))?;
        Ok(resumed.map(|()| slf.into()))
    }

    /// Plan to move the sequence to the host, where its KV needs no device block and is not lost: instead of `preempt`,
    /// where copying it back is cheaper than computing it again. Full blocks that the host has already are not copied.
    /// `reason` and `cost` are noted when the plan is complete: see `preempt`.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     What to copy, from the device to the host; it may be empty, and is to be started and completed even then. Until it
    ///     ends the sequence is "swapping_out": it holds its blocks and has left its batch. Then it is "swapped", or runs again
    ///     if the plan failed.
    ///
    /// Raises
    /// ------
    /// StaleHandle
    ///     It does not run.
    /// StepError
    ///     An open step names it.
    /// TransferError
    ///     There are no host blocks, or copies are queued: `take_copies` comes first.
    /// NeverFits, OutOfBlocks
    ///     The host (`tier="host"`) has fewer blocks than the sequence, or no room now. Nothing was changed.
    ///
    /// Cost: the length of the sequence. If memory runs out (or Ctrl-C comes) when the plan is made already, it is among
    /// `Pager.plans()`.
    #[pyo3(
        signature = (*, reason=Given::NOTHING, cost=Given::NOTHING),
        text_signature = "($self, *, reason='', cost=0.0)"
    )]
    fn swap_out<'py>(&self, py: Python<'py>, reason: Given<'py>, cost: Given<'py>) -> PyResult<Bound<'py, PyAny>> {
        let why = self.checked(py, "swap_out", reason.why(&cost))?;
        let made = self.shared.change(py, |pager| {
            let id = pager.swap_out(self.handle, why)?;
            Ok(Made::of(pager, id))
        })?;
        made.build(py)
    }

    /// As `swap_out`, but None where that raises OutOfBlocks (not NeverFits: waiting cannot help). Compare with `is None`:
    /// an empty plan is false.
    #[pyo3(
        signature = (*, reason=Given::NOTHING, cost=Given::NOTHING),
        text_signature = "($self, *, reason='', cost=0.0)"
    )]
    fn try_swap_out<'py>(
        &self,
        py: Python<'py>,
        reason: Given<'py>,
        cost: Given<'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let why = self.checked(py, "swap_out", reason.why(&cost))?;
        let made = self.shared.change(py, |pager| {
            let id = none_if_full(pager.swap_out(self.handle, why))?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// Plan to bring a swapped sequence back, all or nothing: call it when there is room on the device again. (`resume`
    /// brings it back without a copy: what is not cached any more is computed again.)
    ///
    /// Returns
    /// -------
    /// Plan
    ///     What to copy, from the host to the device; it may be empty, and is to be started and completed even then. Until it
    ///     ends the sequence is "swapping_in" and holds blocks of both tiers. Then it runs, at the positions that it had when
    ///     it left, or is "swapped" again if the plan failed.
    ///
    /// Raises
    /// ------
    /// StaleHandle
    ///     It is not swapped.
    /// NeverFits, OutOfBlocks
    ///     As `Pager.admit`; blocks that kernels of open steps may still use (`num_fenced_blocks`) do not count for what is
    ///     copied.
    ///
    /// Cost, and what if memory runs out: as `swap_out`.
    fn swap_in<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let made = self.shared.change(py, |pager| {
            let id = pager.swap_in(self.handle)?;
            Ok(Made::of(pager, id))
        })?;
        made.build(py)
    }

    /// As `swap_in`, but None where that raises OutOfBlocks. Compare with `is None`: an empty plan is false.
    fn try_swap_in<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let made = self.shared.change(py, |pager| {
            let id = none_if_full(pager.swap_in(self.handle))?;
            Ok(id.map(|id| Made::of(pager, id)))
        })?;
        made.map(|made| made.build(py)).transpose()
    }

    /// End the sequence. Committed full blocks stay cached, the others are free. Idempotent: a second release does
    /// nothing and is counted. reason: "finished" or "aborted", for the eviction policy to learn from; "lru" and
    /// "slru" treat both alike. A `with` statement releases as finished, or as aborted if an exception leaves it.
    #[pyo3(signature = (reason=Given::NOTHING), text_signature = "($self, reason='finished')")]
    fn release(&self, py: Python<'_>, reason: Given<'_>) -> PyResult<()> {
        let departure = self.shared.arguments(py, self.departure(&reason))?;
        self.end(py, departure)
    }

    fn __enter__<'py>(slf: PyRef<'py, Self>, py: Python<'py>) -> PyResult<PyRef<'py, Self>> {
        slf.shared.read(py, |pager| pager.sequence(slf.handle, "__enter__").map(|_| ()))?;
        Ok(slf)
    }

    #[pyo3(signature = (kind, error, trace, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (error, trace);
        if kind.is_none() {
            return self.end(py, Departure::Finished);
        }
        // Whatever went wrong in the body matters more than a pager that can no longer be used (in a forked child,
        // say).
        let _ = self.end(py, Departure::Aborted);
        Ok(())
    }
}

impl Drop for PySequence {
    fn drop(&mut self) {
        if self.is_released() {
            return;
        }
        self.shared.queue_dropped(Dropped::Sequence(self.handle));
        let id = self.handle.serial;
        Python::attach(|py| {
            // Whatever exception is on its way must not be lost to the warning.
            let on_its_way = PyErr::take(py);
            let message = format!(
                "sequence {id} was dropped without release(): the next call that changes its pager releases it"
            );
            if let Ok(message) = std::ffi::CString::new(message)
                && let Err(error) = PyErr::warn(py, &py.get_type::<PyResourceWarning>(), &message, 1)
            {
                error.write_unraisable(py, None);
            }
            if let Some(error) = on_its_way {
                error.restore(py);
            }
        });
    }
}
