//! `kvpager.Step`: positions that were planned, until they are committed or cancelled.

use std::sync::atomic::{AtomicU8, Ordering};

use kvpager_core::Error;
use kvpager_core::batch::{Ragged, Tables};
use kvpager_core::memory::{with_capacity, zeroed};
use kvpager_core::pager::Outcome;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::batch::{Ints, PyBatch, pairs};
use crate::errors::{step_error, to_python};
use crate::integers;

const OPEN: u8 = 0;
const COMMITTED: u8 = 1;
const CANCELLED: u8 = 2;

/// One step of a batch: positions that a kernel is to compute, and the arrays that it reads.
///
/// Made by `Batch.step`. End it by `commit` once its KV is written, or by `cancel` if it was never launched. The
/// arrays are views of the batch's, valid until then; reading them later raises StepError.
#[pyclass(frozen, name = "Step", module = "kvpager", freelist = 8)]
pub struct PyStep {
    batch: Py<PyBatch>,
    id: u64,
    num_rows: usize,
    num_tokens: usize,
    state: AtomicU8,
}

impl PyStep {
    pub fn new(batch: Py<PyBatch>, id: u64, num_rows: usize, num_tokens: usize) -> Self {
        Self { batch, id, num_rows, num_tokens, state: AtomicU8::new(OPEN) }
    }

    fn name_of_state(&self) -> &'static str {
        match self.state.load(Ordering::Relaxed) {
            OPEN => "open",
            COMMITTED => "committed",
            _ => "cancelled",
        }
    }

    fn check_open(&self, py: Python<'_>, what: &str) -> PyResult<()> {
        if self.state.load(Ordering::Relaxed) == OPEN {
            return Ok(());
        }
        Err(step_error(py, format!("{what}: step {} is {} already", self.id, self.name_of_state())))
    }

    /// Something made of this step's lengths and tables.
    fn form<R>(&self, py: Python<'_>, name: &str, make: impl FnOnce(Tables<'_>) -> Result<R, Error>) -> PyResult<R> {
        self.check_open(py, name)?;
        let batch = self.batch.get();
        batch.shared.read(py, |pager| {
            let arrays = batch.arrays.of_buffer(py, &batch.shape, self.buffer())?;
            let columns = batch.shape.max_blocks;
            make(Tables {
                seq_lens: &arrays.seq_lens[..self.num_rows],
                block_tables: &arrays.block_tables[..self.num_rows * columns],
                columns,
                block_size: pager.config().block_size,
            })
        })
    }

    /// The first `len` entries of this step's buffer in an array of the batch.
    fn view<'py>(&self, array: &Bound<'py, PyAny>, name: &str, len: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = array.py();
        self.check_open(py, name)?;
        let rows = pyo3::types::PySlice::new(py, 0, len.cast_signed(), 1);
        array.get_item((self.buffer(), rows))
    }
}

#[pymethods]
impl PyStep {
    /// Number of the step in its batch. A cancelled step's number is used again.
    #[getter]
    fn id(&self) -> u64 {
        self.id
    }

    /// The buffer whose arrays it fills.
    #[getter]
    fn buffer(&self) -> usize {
        (self.id % self.batch.get().shape.buffers as u64) as usize
    }

    /// "open", "committed" or "cancelled".
    #[getter]
    fn state(&self) -> &'static str {
        self.name_of_state()
    }

    /// Rows: those of the batch when the step was planned.
    #[getter]
    fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Planned positions of all rows.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    fn __repr__(&self) -> String {
        format!(
            "<kvpager.Step {}: {}, {} rows, {} tokens>",
            self.id,
            self.name_of_state(),
            self.num_rows,
            self.num_tokens
        )
    }

    /// int32 [num_rows, max_blocks]: physical block of each logical block, padded.
    #[getter]
    fn block_tables<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(self.batch.get().arrays.block_tables.bind(py).as_any(), "block_tables", self.num_rows)
    }

    /// int32 [num_rows]: tokens of each row, this step's included.
    #[getter]
    fn seq_lens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(self.batch.get().arrays.seq_lens.bind(py).as_any(), "seq_lens", self.num_rows)
    }

    /// int64 [num_tokens]: `block_id * block_size + offset` of each planned position, rows in order.
    #[getter]
    fn slot_mapping<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(self.batch.get().arrays.slot_mapping.bind(py).as_any(), "slot_mapping", self.num_tokens)
    }

    /// int32 [num_tokens]: the planned positions, rows in order.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(self.batch.get().arrays.positions.bind(py).as_any(), "positions", self.num_tokens)
    }

    /// int32 [num_rows + 1]: row r has positions `query_start_loc[r]` to `query_start_loc[r + 1] - 1` of the flat arrays.
    #[getter]
    fn query_start_loc<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.view(self.batch.get().arrays.query_start_loc.bind(py).as_any(), "query_start_loc", self.num_rows + 1)
    }

    /// int32 [num_tokens]: tokens of the planned positions as they are known now; -1 for placeholders, and for rows that
    /// are void. A copy.
    #[getter]
    fn token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        self.check_open(py, "token_ids")?;
        let batch = self.batch.get();
        let tokens = batch.shared.look(py, |pager| pager.step_tokens(batch.handle, self.id))?;
        Ok(PyArray1::from_vec(py, tokens))
    }

    /// int32 [n, 2], (source, target): block copies to carry out before the kernel, in any order. A copy.
    #[getter]
    fn copies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        self.check_open(py, "copies")?;
        let batch = self.batch.get();
        let copies: Vec<(u32, u32)> = batch.shared.read(py, |pager| {
            let lent = &pager.get_batch(batch.handle)?.plan(self.id).copies;
            let mut copies = with_capacity(lent.len())?;
            copies.extend(lent.iter().map(|copy| (copy.source, copy.target)));
            Ok(copies)
        })?;
        pairs(py, copies.into_iter())
    }

    /// int32 [n, 3], (row, column, block): applied to a copy of the block tables that had all earlier updates, they make
    /// it right. A copy.
    #[getter]
    fn updates<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        self.check_open(py, "updates")?;
        let (batch, buffer) = (self.batch.get(), self.buffer());
        let updates = batch.shared.read(py, |pager| {
            let state = pager.get_batch(batch.handle)?;
            let tables = batch.arrays.of_buffer(py, &batch.shape, buffer)?.block_tables;
            let plan = state.plan(self.id);
            let mut updates = with_capacity(plan.updates.iter().map(|(_, from, to)| 3 * (to - from) as usize).sum())?;
            for &(row, from, to) in &plan.updates {
                for column in from..to {
                    let block = tables[row as usize * batch.shape.max_blocks + column as usize];
                    updates.extend([row.cast_signed(), column.cast_signed(), block]);
                }
            }
            Ok(updates)
        })?;
        let rows = updates.len() / 3;
        PyArray1::from_vec(py, updates).reshape([rows, 3])
    }

    /// Each row's blocks, one behind the other (FlashInfer's form): `(indptr, indices, last_page_len)`, int32 [num_rows +
    /// 1], [all rows' blocks], [num_rows]. Row r has `indices[indptr[r] : indptr[r + 1]]`, enough for `seq_lens[r]` tokens;
    /// `last_page_len` of them are in the last, 0 in a row without tokens. ValueError if `seq_lens` was written to and
    /// does not fit. Cost: one copy of the blocks.
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<(Ints<'py>, Ints<'py>, Ints<'py>)> {
        let (Ragged { indptr, indices }, last) =
            self.form(py, "pages", |tables| Ok((tables.pages()?, tables.last_page_lens()?)))?;
        Ok((PyArray1::from_vec(py, indptr), PyArray1::from_vec(py, indices), PyArray1::from_vec(py, last)))
    }

    /// The slot of each position of each row, one behind the other: `(indptr, indices)`, int32 [num_rows + 1], [all rows'
    /// positions]. ValueError where a slot is beyond int32.
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<(Ints<'py>, Ints<'py>)> {
        let Ragged { indptr, indices } = self.form(py, "slots", |tables| tables.slots())?;
        Ok((PyArray1::from_vec(py, indptr), PyArray1::from_vec(py, indices)))
    }

    /// The slot of each position of each row: int32 [num_rows, longest row], 0 behind a row's last position. ValueError
    /// where a slot is beyond int32.
    fn token_table<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let (table, width) = self.form(py, "token_table", |tables| {
            tables.check()?;
            Ok((tables.token_table(tables.longest())?, tables.longest()))
        })?;
        PyArray1::from_vec(py, table).reshape([self.num_rows, width])
    }

    /// Say that this step's KV is written: call it after the kernel, oldest step first.
    ///
    /// Parameters
    /// ----------
    /// next_tokens : 1-D integer array [num_rows], optional
    ///     The token behind each row's last position: appended, or put where a later step has planned a placeholder.
    ///     -1: none. Ignored for rows that are left out, void, or still inside their prompt.
    /// num_accepted : 1-D integer array [num_rows], optional
    ///     Of a row with d drafts so many stay, 0..d; the others are cut off. Without it all stay.
    ///
    /// Returns
    /// -------
    /// bool [num_rows]
    ///     True where the row was applied. Others were left out, or their sequence was released, preempted or cut short
    ///     since: discard what was sampled for them.
    ///
    /// Raises
    /// ------
    /// StepError
    ///     It is not the oldest open step. Nothing was changed.
    /// ValueError, TypeError
    ///     Wrong lengths or values. Nothing was changed.
    #[pyo3(signature = (next_tokens=None, num_accepted=None))]
    fn commit<'py>(
        &self,
        py: Python<'py>,
        next_tokens: Option<&Bound<'py, PyAny>>,
        num_accepted: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<bool>>> {
        let batch = self.batch.get();
        self.check_open(py, "commit")?;
        let numbers = |argument: Option<&Bound<'py, PyAny>>, name| {
            argument.map(|argument| integers::numbers(argument, name)).transpose()
        };
        let arguments = numbers(next_tokens, "next_tokens")
            .and_then(|next_tokens| Ok((next_tokens, numbers(num_accepted, "num_accepted")?)));
        // What is wrong with them comes after what is wrong with the time of the call.
        let (next_tokens, num_accepted) = arguments.or_else(|error| {
            batch.shared.change(py, |pager| pager.check_oldest(batch.handle, self.id))?;
            Err(error)
        })?;
        let mut applied = zeroed(self.num_rows).map_err(|error| to_python(py, error))?;
        batch.shared.change(py, |pager| {
            let outcome = Outcome { next_tokens: next_tokens.as_deref(), num_accepted: num_accepted.as_deref() };
            pager.commit_step(batch.handle, self.id, outcome, &mut applied)
        })?;
        self.state.store(COMMITTED, Ordering::Relaxed);
        Ok(PyArray1::from_slice(py, &applied))
    }

    /// Take the plan back: this step was never launched. Positions, placeholders and tables are as before; what was
    /// evicted stays evicted. StepError unless it is the newest open step, and neither a step of another batch nor copies
    /// were handed out since.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let batch = self.batch.get();
        self.check_open(py, "cancel")?;
        batch.shared.change(py, |pager| pager.cancel_step(batch.handle, self.id))?;
        self.state.store(CANCELLED, Ordering::Relaxed);
        Ok(())
    }
}
