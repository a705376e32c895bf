//! `kvpager.Batch`: rows of sequences that are stepped together.

use std::sync::Arc;

use kvpager_core::Pager;
use kvpager_core::batch::Shape;
use kvpager_core::ids::Handle;
use kvpager_core::memory::zeroed;
use kvpager_core::pager::Counts;
use numpy::{Element, PyArray1, PyArray2, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};

use crate::arguments::Given;
use crate::buffers::{BatchArrays, Owner};
use crate::errors::{self, config_error};
use crate::integers;
use crate::sequence::PySequence;
use crate::shared::{Dropped, Shared, none_if_full};
use crate::step::PyStep;

/// Rows of running sequences that are stepped together: one call for a decode step of all of them.
///
/// Made by `Pager.batch`. Each step fills the arrays of its buffer, which kernels read. A batch that is dropped
/// cancels its open steps; its sequences go on.
#[pyclass(frozen, name = "Batch", module = "kvpager")]
pub struct PyBatch {
    pub shared: Arc<Shared>,
    pub handle: Handle,
    pub shape: Shape,
    pub arrays: BatchArrays,
}

/// An int32 array of one dimension.
pub type Ints<'py> = Bound<'py, PyArray1<i32>>;

/// How many positions each row plans.
enum Numbers {
    All(u32),
    Each(Vec<i32>),
}

impl Numbers {
    fn from_any(argument: &Given<'_>) -> PyResult<Self> {
        let Some(argument) = argument.get() else { return Ok(Self::All(1)) };
        let is_number = argument.is_instance_of::<PyInt>()
            || (argument.cast::<PyUntypedArray>().is_err() && argument.hasattr("__index__")?);
        if !is_number {
            return integers::numbers(argument, "num_tokens").map(Self::Each);
        }
        let number = integers::number(argument, "num_tokens", None)?;
        u32::try_from(number)
            .map(Self::All)
            .map_err(|_| PyValueError::new_err(format!("num_tokens is {number}; it must be 0 or more")))
    }

    fn counts(&self) -> Counts<'_> {
        match self {
            Self::All(number) => Counts::All(*number),
            Self::Each(numbers) => Counts::Each(numbers),
        }
    }
}

/// Tokens behind the known ones, if any are given.
fn drafts(tokens: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<i32>>> {
    tokens.map(|tokens| integers::numbers(tokens, "tokens")).transpose()
}

impl PyBatch {
    /// A batch of a pager, in arrays of its own or of the caller's (`arrays`: name -> array or writable buffer).
    pub fn new(
        py: Python<'_>,
        shared: &Arc<Shared>,
        shape: Shape,
        arrays: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        shape.validate().map_err(|error| errors::to_python(py, error))?;
        let (buffers, seqs) = (shape.buffers, shape.max_seqs);
        let mut given = Vec::new();
        if let Some(arrays) = arrays {
            for (name, array) in arrays.copy()? {
                given.push((name.extract::<String>()?, array));
            }
        }
        let is_zeroed = given.is_empty();
        let mut owners = Vec::new();
        let mut of = |name: &str| {
            let found = given.iter().position(|(given, _)| given == name);
            found.map(|at| given.swap_remove(at).1)
        };
        let arrays = BatchArrays {
            block_tables: array(
                py,
                "block_tables",
                of("block_tables"),
                &mut owners,
                &[buffers, seqs, shape.max_blocks],
            )?,
            seq_lens: array(py, "seq_lens", of("seq_lens"), &mut owners, &[buffers, seqs])?,
            slot_mapping: array(py, "slot_mapping", of("slot_mapping"), &mut owners, &[buffers, shape.max_tokens])?,
            positions: array(py, "positions", of("positions"), &mut owners, &[buffers, shape.max_tokens])?,
            query_start_loc: array(py, "query_start_loc", of("query_start_loc"), &mut owners, &[buffers, seqs + 1])?,
            owners,
        };
        if let Some((name, _)) = given.first() {
            return Err(config_error(
                py,
                format!("there is no array {name:?}: block_tables, seq_lens, slot_mapping, positions, query_start_loc"),
            ));
        }
        for buffer in 0..buffers {
            let mut parts = arrays.of_buffer(py, &shape, buffer).map_err(|error| errors::to_python(py, error))?;
            parts.blank(&shape, is_zeroed);
        }
        let handle = shared.change(py, |pager| pager.batch(shape))?;
        Ok(Self { shared: Arc::clone(shared), handle, shape, arrays })
    }

    /// The arguments of a step. What is wrong with them comes after what is wrong with the time of the call.
    fn arguments(
        &self,
        py: Python<'_>,
        num_tokens: &Given<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
        is_change: bool,
    ) -> PyResult<(Numbers, Option<Vec<i32>>)> {
        let arguments = Numbers::from_any(num_tokens).and_then(|numbers| Ok((numbers, drafts(tokens)?)));
        arguments.or_else(|error| {
            let check = |pager: &mut Pager| pager.check_buffers(self.handle);
            if is_change { self.shared.change(py, check) } else { self.shared.look(py, check) }?;
            Err(error)
        })
    }

    fn plan(
        slf: &Bound<'_, Self>,
        num_tokens: &Given<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
        is_try: bool,
    ) -> PyResult<Option<PyStep>> {
        let (py, batch) = (slf.py(), slf.get());
        let (numbers, tokens) = batch.arguments(py, num_tokens, tokens, true)?;
        let planned = batch.shared.change(py, |pager| {
            let state = pager.get_batch(batch.handle)?;
            let buffer = state.buffer_of(state.next);
            let mut arrays = batch.arrays.of_buffer(py, &batch.shape, buffer)?;
            let step = pager.step(batch.handle, numbers.counts(), tokens.as_deref(), &mut arrays);
            let step = if is_try { none_if_full(step)? } else { Some(step?) };
            let Some(step) = step else { return Ok(None) };
            let plan = pager.get_batch(batch.handle)?.plan(step);
            Ok(Some((step, plan.rows.len(), plan.num_tokens)))
        })?;
        Ok(planned.map(|(step, rows, num_tokens)| PyStep::new(slf.clone().unbind(), step, rows, num_tokens)))
    }
}

/// An array of the batch: zeros of its own, or the caller's memory.
fn array<T: Element + Clone + Default>(
    py: Python<'_>,
    name: &str,
    given: Option<Bound<'_, PyAny>>,
    owners: &mut Vec<Owner>,
    dimensions: &[usize],
) -> PyResult<Py<PyArrayDyn<T>>> {
    let len = dimensions.iter().product();
    let Some(given) = given else {
        let zeros = zeroed::<T>(len).map_err(|error| errors::to_python(py, error))?;
        return Ok(PyArray1::from_vec(py, zeros).reshape(dimensions)?.unbind());
    };
    let numpy = py.import("numpy")?;
    let refused = |what: String| {
        config_error(
            py,
            format!(
                "{name} must be a writable, C-contiguous, aligned buffer of {len} {} ({}), not {what}",
                T::get_dtype(py),
                dimensions.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ")
            ),
        )
    };
    let array = if given.is_instance(&numpy.getattr("ndarray")?)? {
        given
    } else {
        numpy.call_method1("frombuffer", (&given, T::get_dtype(py))).map_err(|error| refused(error.to_string()))?
    };
    let Ok(typed) = array.cast::<PyArrayDyn<T>>() else {
        return Err(refused(format!("dtype {}", array.getattr("dtype")?)));
    };
    if typed.len() != len {
        return Err(refused(format!("{} values", typed.len())));
    }
    if !typed.is_c_contiguous() || !typed.is_aligned() || !array.getattr("flags")?.getattr("writeable")?.is_truthy()? {
        return Err(refused("one that is read-only, misaligned or in pieces".to_owned()));
    }
    owners.push(Owner::of(&array)?);
    Ok(typed.reshape(dimensions)?.unbind())
}

#[pymethods]
impl PyBatch {
    /// Rows there can be.
    #[getter]
    fn max_seqs(&self) -> usize {
        self.shape.max_seqs
    }

    /// Columns of the block tables.
    #[getter]
    fn max_blocks(&self) -> usize {
        self.shape.max_blocks
    }

    /// Positions that one step can plan.
    #[getter]
    fn max_tokens(&self) -> usize {
        self.shape.max_tokens
    }

    /// Steps that may be open at once. Step k fills buffer k mod `buffers`.
    #[getter]
    fn buffers(&self) -> usize {
        self.shape.buffers
    }

    /// The highest row in use + 1.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.read(py, |pager| Ok(pager.get_batch(self.handle)?.rows.len()))
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.read(py, |pager| Ok(pager.get_batch(self.handle)?.num_sequences))
    }

    #[expect(clippy::unused_self, reason = "Python calls it on a batch")]
    fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let Shape { max_seqs, max_blocks, max_tokens, buffers, .. } = self.shape;
        let sequences = self.__len__(py)?;
        Ok(format!(
            "<kvpager.Batch: {sequences} sequences; max_seqs={max_seqs}, max_blocks={max_blocks}, max_tokens={max_tokens}, buffers={buffers}>"
        ))
    }

    /// The block tables of all buffers: int32 [buffers, max_seqs, max_blocks]. For captured graphs and pinned memory;
    /// a step has its own part.
    #[getter]
    fn block_tables(&self, py: Python<'_>) -> Py<PyArrayDyn<i32>> {
        self.arrays.block_tables.clone_ref(py)
    }

    /// Planned ends of the rows, of all buffers: int32 [buffers, max_seqs].
    #[getter]
    fn seq_lens(&self, py: Python<'_>) -> Py<PyArrayDyn<i32>> {
        self.arrays.seq_lens.clone_ref(py)
    }

    /// Slots of the planned positions, of all buffers: int64 [buffers, max_tokens].
    #[getter]
    fn slot_mapping(&self, py: Python<'_>) -> Py<PyArrayDyn<i64>> {
        self.arrays.slot_mapping.clone_ref(py)
    }

    /// The planned positions, of all buffers: int32 [buffers, max_tokens].
    #[getter]
    fn positions(&self, py: Python<'_>) -> Py<PyArrayDyn<i32>> {
        self.arrays.positions.clone_ref(py)
    }

    /// Where each row's positions start, of all buffers: int32 [buffers, max_seqs + 1].
    #[getter]
    fn query_start_loc(&self, py: Python<'_>) -> Py<PyArrayDyn<i32>> {
        self.arrays.query_start_loc.clone_ref(py)
    }

    /// Put a running sequence into the lowest empty row; returns the row. StaleHandle unless it runs; ValueError if
    /// it is in a batch already or belongs to another pager, if its table has more than `max_blocks` blocks, or if all
    /// rows are in use. Release and preempt take a sequence out again. Keep the Sequence: the batch does not, and one
    /// that the garbage collector takes is released.
    fn add(&self, py: Python<'_>, sequence: &Bound<'_, PySequence>) -> PyResult<u32> {
        let sequence = sequence.get().handle_in(py, &self.shared, "add")?;
        self.shared.change(py, |pager| pager.add_row(self.handle, sequence))
    }

    /// Empty the row of a sequence, which goes on without a batch; returns the row. Open steps still name it.
    /// ValueError if it is not in this batch.
    fn remove(&self, py: Python<'_>, sequence: &Bound<'_, PySequence>) -> PyResult<u32> {
        let sequence = sequence.get().handle_in(py, &self.shared, "add")?;
        self.shared.change(py, |pager| pager.remove_row(self.handle, sequence))
    }

    /// The row of a sequence; None if it is not in this batch.
    fn row_of(&self, py: Python<'_>, sequence: &Bound<'_, PySequence>) -> PyResult<Option<u32>> {
        let sequence = sequence.get().handle_in(py, &self.shared, "add")?;
        self.shared.read(py, |pager| Ok(pager.row_of(self.handle, sequence)))
    }

    /// Fill empty rows with sequences from the last rows; returns the moves: int32 [n, 2], (from, to), in order.
    fn condense<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i32>>> {
        let moves = self.shared.change(py, |pager| pager.condense(self.handle))?;
        pairs(py, moves.into_iter())
    }

    /// Plan `num_tokens` more positions of each row (an integer, or one for each row, 0 leaves it out), take the blocks
    /// that they need, and fill this step's arrays; returns the Step.
    ///
    /// Parameters
    /// ----------
    /// num_tokens : int or 1-D integer array [num_rows]
    ///     Positions inside the known tokens take those (prefill, chunks). An empty row has 0.
    /// tokens : 1-D integer array, optional
    ///     For each position behind the known tokens, rows in order: a draft token, or -1 for a placeholder. Without it
    ///     such positions are placeholders: the token is given by the commit of the step before. A placeholder is the
    ///     first position of a row whose last position is in an open step.
    ///
    /// Raises
    /// ------
    /// OutOfBlocks
    ///     Its `rows` do not fit; without them the step does. Nothing was changed.
    /// StepError
    ///     All buffers hold open steps.
    /// ValueError, TypeError, TokenError
    ///     Wrong lengths or values. Nothing was changed.
    ///
    /// Cost: a few nanoseconds a row, more where a row needs a block. No cost with the length of a sequence.
    #[pyo3(signature = (num_tokens=Given::NOTHING, tokens=None), text_signature = "($self, num_tokens=1, tokens=None)")]
    fn step(
        slf: &Bound<'_, Self>,
        num_tokens: Given<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<PyStep>> {
        Self::plan(slf, &num_tokens, tokens, false)
    }

    /// As `step`, but None where that raises OutOfBlocks.
    #[pyo3(signature = (num_tokens=Given::NOTHING, tokens=None), text_signature = "($self, num_tokens=1, tokens=None)")]
    fn try_step(
        slf: &Bound<'_, Self>,
        num_tokens: Given<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<PyStep>> {
        Self::plan(slf, &num_tokens, tokens, true)
    }

    /// Blocks that the same `step` would take. Raises what that raises, but for OutOfBlocks.
    #[pyo3(signature = (num_tokens=Given::NOTHING, tokens=None), text_signature = "($self, num_tokens=1, tokens=None)")]
    fn blocks_needed(
        &self,
        py: Python<'_>,
        num_tokens: Given<'_>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (numbers, tokens) = self.arguments(py, &num_tokens, tokens, false)?;
        self.shared.look(py, |pager| pager.blocks_needed(self.handle, numbers.counts(), tokens.as_deref()))
    }

    /// Put writable blocks for the next `num_tokens` positions of each row into the tables, all or nothing, and plan
    /// nothing: for engines that compute slots on the device. Raises OutOfBlocks, ValueError and TypeError as `step`.
    #[pyo3(signature = (num_tokens=Given::NOTHING), text_signature = "($self, num_tokens=1)")]
    fn reserve(&self, py: Python<'_>, num_tokens: Given<'_>) -> PyResult<()> {
        let numbers = self.shared.arguments(py, Numbers::from_any(&num_tokens))?;
        self.shared.change(py, |pager| pager.reserve(self.handle, numbers.counts()))
    }

    /// As `reserve`, but False where that raises OutOfBlocks, else True.
    #[pyo3(signature = (num_tokens=Given::NOTHING), text_signature = "($self, num_tokens=1)")]
    fn try_reserve(&self, py: Python<'_>, num_tokens: Given<'_>) -> PyResult<bool> {
        let numbers = self.shared.arguments(py, Numbers::from_any(&num_tokens))?;
        let reserve = |pager: &mut Pager| none_if_full(pager.reserve(self.handle, numbers.counts()));
        Ok(self.shared.change(py, reserve)?.is_some())
    }

    /// n children of the sequence of each of these rows, each in a row of its own (the lowest empty ones, in order):
    /// parallel samples. Returns a list of Sequences, those of `rows[0]` first. ValueError for a row that is empty or
    /// named twice, unless 1 <= n <= 65,536, or if there are not enough empty rows; nothing was changed then.
    fn fork(&self, py: Python<'_>, rows: &Bound<'_, PyAny>, n: Given<'_>) -> PyResult<Vec<PySequence>> {
        let arguments = integers::numbers(rows, "rows").and_then(|rows| Ok((rows, n.position("n", 1, "1 to 65536")?)));
        let (rows, n) = self.shared.arguments(py, arguments)?;
        let handles = self.shared.change(py, |pager| pager.fork_rows(self.handle, &rows, n))?;
        Ok(handles.into_iter().map(|handle| PySequence::new(&self.shared, handle)).collect())
    }

    /// A beam step: beam i continues the sequence of row `parents[i]` with `tokens[i]`. Call it after a commit without
    /// next tokens, while no step is open.
    ///
    /// Parameters
    /// ----------
    /// parents, tokens : 1-D integer arrays of one length
    ///     A row may be the parent of several beams: the first keeps its sequence, the others get children of it, which
    ///     share its blocks; a partial block is copied by the next step. Rows that are no parent are released.
    /// rows : 1-D integer array, optional
    ///     The rows that take part; all in use by default. Others stay as they are.
    ///
    /// Returns
    /// -------
    /// (int32 [len(parents)], list of Sequence or None)
    ///     The row of each beam, and its new sequence, None where it keeps its parent's.
    ///
    /// Raises
    /// ------
    /// StepError, ValueError, TokenError
    ///     A step is open; wrong rows, or a parent with tokens that are not committed; too few empty rows. Nothing was
    ///     changed.
    #[pyo3(signature = (parents, tokens, rows=None))]
    fn reorder<'py>(
        &self,
        py: Python<'py>,
        parents: &Bound<'py, PyAny>,
        tokens: &Bound<'py, PyAny>,
        rows: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Ints<'py>, Vec<Option<PySequence>>)> {
        let arguments = integers::numbers(parents, "parents").and_then(|parents| {
            let tokens = integers::numbers(tokens, "tokens")?;
            Ok((parents, tokens, rows.map(|rows| integers::numbers(rows, "rows")).transpose()?))
        });
        let (parents, tokens, rows) = self.shared.arguments(py, arguments)?;
        let beams = self.shared.change(py, |pager| {
            let num_rows = pager.get_batch(self.handle)?.num_sequences;
            self.shared.expect_released(num_rows)?;
            let beams = pager.reorder(self.handle, &parents, &tokens, rows.as_deref())?;
            self.shared.note_released(&beams.released);
            Ok(beams)
        })?;
        let places = PyArray1::from_iter(py, beams.places.into_iter().map(u32::cast_signed));
        let children =
            beams.children.into_iter().map(|child| child.map(|handle| PySequence::new(&self.shared, handle)));
        Ok((places, children.collect()))
    }

    /// The open steps, oldest first.
    #[getter]
    fn open_steps(slf: &Bound<'_, Self>) -> PyResult<Vec<PyStep>> {
        let batch = slf.get();
        let open = batch.shared.read(slf.py(), |pager| {
            let state = pager.get_batch(batch.handle)?;
            let open = state.oldest..state.next;
            Ok(open.map(|step| (step, state.plan(step).rows.len(), state.plan(step).num_tokens)).collect::<Vec<_>>())
        })?;
        let step = |(step, rows, tokens)| PyStep::new(slf.clone().unbind(), step, rows, tokens);
        Ok(open.into_iter().map(step).collect())
    }
}

impl Drop for PyBatch {
    fn drop(&mut self) {
        self.shared.queue_dropped(Dropped::Batch(self.handle));
    }
}

/// int32 [n, 2].
pub fn pairs(py: Python<'_>, pairs: impl ExactSizeIterator<Item = (u32, u32)>) -> PyResult<Bound<'_, PyArray2<i32>>> {
    let rows = pairs.len();
    let values: Vec<i32> = pairs.flat_map(|(a, b)| [a.cast_signed(), b.cast_signed()]).collect();
    PyArray1::from_vec(py, values).reshape([rows, 2])
}
