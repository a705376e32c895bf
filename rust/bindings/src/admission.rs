//! `kvpager.Admission`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvpager_core::admission::{MEMORY_LIMITS, PATIENCE_LIMITS, PRIOR_LIMITS, RISK_LIMITS, Settings, Verdict, Wait};
use kvpager_core::error::Result;
use kvpager_core::pager::{Hint, Pager};
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyString, PyType};

use crate::arguments::{Given, wrong_type};
use crate::errors::shown;
use crate::integers::numbers;
use crate::pager::{PyPager, request, started_of, wished};
use crate::plans::Made;
use crate::sequence::PySequence;
use crate::shared::Shared;

/// Admissions so far. No decision looks at it.
static MADE: AtomicU64 = AtomicU64::new(0);
/// Characters that the name of a kind may have.
const KIND_CHARS_MAX: usize = 200;

/// Decides who comes in, so that those who run do not run out of blocks later.
///
/// It projects what the pool will hold while those who run get longer and end, and admits a request if the
/// probability that they run out stays below a bound that `risk` sets. How long answers get it learns from the
/// sequences of the pager, by kind: from those that were released as "finished", and from those that still run. There
/// is nothing to report.
///
/// Parameters
/// ----------
/// pager : Pager
///     A pager has one: a new one takes over, and the calls of the one before raise ValueError.
/// risk : float
///     Probability of running out that is taken, 0..1; less of running out soon. Who came in with p tokens of its own and is
///     preempted after h steps has gained h, and computes p + h again: of running out by then risk * h / (p + h) is taken.
///     1: whatever fits now comes in, behind the pager's watermark. 0: room is kept for the longest answer of each, and
///     nobody is counted on to end.
/// prior_tokens : int
///     Half of all answers are assumed to be longer, as long as none has ended. 1..1048575.
/// memory : int
///     About so many answers that ended are remembered, of each kind. 1..1000000.
/// patience : int
///     How often a request that waits may be passed over. 0..2**32-1.
///
/// Raises
/// ------
/// ConfigError
///     For a value outside its limits.
///
/// No clock and no chance: the same calls give the same answers. Any thread may call.
#[pyclass(frozen, name = "Admission", module = "kvpager")]
pub struct PyAdmission {
    shared: Arc<Shared>,
    settings: Settings,
    generation: u64,
    /// Names it in the answers that it gives, among all of the process.
    number: u64,
}

#[pymethods]
impl PyAdmission {
    #[new]
    #[pyo3(
        signature = (pager, *, risk=Given::NOTHING, prior_tokens=Given::NOTHING, memory=Given::NOTHING, patience=Given::NOTHING),
        text_signature = "(pager, *, risk=0.28, prior_tokens=1024, memory=500, patience=100)"
    )]
    fn new(
        py: Python<'_>,
        pager: &PyPager,
        risk: Given<'_>,
        prior_tokens: Given<'_>,
        memory: Given<'_>,
        patience: Given<'_>,
    ) -> PyResult<Self> {
        let settings = Settings {
            risk: risk.share("risk", 0.28, RISK_LIMITS)?,
            prior_tokens: prior_tokens.setting("prior_tokens", 1024, PRIOR_LIMITS)?,
            memory: memory.setting("memory", 500, MEMORY_LIMITS)?,
            patience: patience.setting("patience", 100, PATIENCE_LIMITS)?,
        };
        let shared = Arc::clone(pager.shared());
        let generation = shared.change(py, |pager| pager.set_control(settings))?;
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { shared, settings, generation, number })
    }

    fn __repr__(&self) -> String {
        let Settings { risk, prior_tokens, memory, patience } = self.settings;
        format!("<kvpager.Admission risk={risk:?}, prior_tokens={prior_tokens}, memory={memory}, patience={patience}>")
    }

    /// Probability of running out that is taken.
    #[getter]
    fn risk(&self) -> f64 {
        self.settings.risk
    }

    /// Half of all answers are assumed to be longer, as long as none has ended.
    #[getter]
    fn prior_tokens(&self) -> u32 {
        self.settings.prior_tokens
    }

    /// About so many answers that ended are remembered.
    #[getter]
    fn memory(&self) -> u32 {
        self.settings.memory
    }

    /// How often a request that waits may be passed over.
    #[getter]
    fn patience(&self) -> u32 {
        self.settings.patience
    }

    /// Decide about a request, and admit it: all in one, so that nothing comes in between.
    ///
    /// Parameters
    /// ----------
    /// prompt : tokens
    ///     As for `Pager.admit`.
    /// max_tokens : int, optional
    ///     Tokens that the answer may have at most, 1 or more.
    /// expected_tokens : int, optional
    ///     How many it will have, if that is known: taken at its word until the answer is longer.
    /// samples : int
    ///     Sequences that it is forked into when its prompt is computed, itself included, 1..65535: room is kept for each.
    /// kind : str
    ///     Requests of one kind have answers of about one length; what is learned of them is kept apart. At most 64 kinds, of
    ///     200 characters at most.
    /// namespace, wait, fetch, fetch_min_tokens
    ///     As for `Pager.admit`. (`wait` is about another sequence's prefill: what would be computed twice.)
    /// waited : Wait, optional
    ///     What the same request was answered before. With it the controller sees to it that nobody who waits, and is asked
    ///     about in each round or so, is passed over more than `patience` times. See `give_up` for one that goes away.
    ///
    /// Returns
    /// -------
    /// Sequence
    ///     It is admitted.
    /// Computing
    ///     With `wait` only: another sequence is about to compute more of the prompt. Nothing has changed. Ask again after the
    ///     next step, with the same `waited` as this time.
    /// Wait
    ///     Not now; nothing has changed. Ask again after the next step, or when something has ended. Others may be asked
    ///     about meanwhile.
    /// Never
    ///     The prompt is larger than the pool.
    ///
    /// While no other sequence runs, all that fits is admitted.
    ///
    /// Raises
    /// ------
    /// TokenError, TokenTypeError, ConfigError
    ///     As `Pager.admit`. ValueError for the other arguments.
    ///
    /// Cost: that of the admission, and some tens of microseconds for 1,000 running sequences.
    #[pyo3(
        signature = (
            prompt, *, max_tokens=None, expected_tokens=None, samples=Given::NOTHING, kind=Given::NOTHING,
            namespace=Given::NOTHING, wait=Given::NOTHING, fetch=Given::NOTHING, fetch_min_tokens=Given::NOTHING, waited=None
        ),
        text_signature = "($self, prompt, *, max_tokens=None, expected_tokens=None, samples=1, kind='', namespace=b'', \
            wait=False, fetch=False, fetch_min_tokens=1, waited=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "options, by name")]
    fn try_admit<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        max_tokens: Option<Given<'py>>,
        expected_tokens: Option<Given<'py>>,
        samples: Given<'py>,
        kind: Given<'py>,
        namespace: Given<'py>,
        wait: Given<'py>,
        fetch: Given<'py>,
        fetch_min_tokens: Given<'py>,
        waited: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let kind = kind.get().cloned().unwrap_or_else(|| PyString::new(py, "").into_any());
        let arguments = || {
            let Ok(kind) = kind.cast::<PyString>() else { return Err(wrong_type(&kind, "kind", "a str")) };
            let hint = Hint {
                kind: kind_name(kind)?,
                max_tokens: length(max_tokens.as_ref(), "max_tokens")?,
                expected_tokens: length(expected_tokens.as_ref(), "expected_tokens")?,
                samples: samples_of(&samples)?,
                ticket: ticket(py, waited.as_ref())?,
            };
            let request = request(py, prompt, &namespace, &Given::NOTHING)?;
            Ok((wished(py, &self.shared, request, &wait, &fetch, &fetch_min_tokens)?, hint))
        };
        let ((tokens, namespace, wish), hint) = self.shared.arguments(py, arguments())?;
        let verdict = self.shared.change_with(py, &tokens, |pager, tokens| {
            pager.try_enter(self.generation, tokens, &namespace, wish, hint)
        })?;
        match verdict {
            Verdict::In(started) => started_of(py, &self.shared, started),
            Verdict::Wait(wait) => wait_of(py, wait, self.number),
            Verdict::Never { needed, usable } => never_of(py, needed, usable),
        }
    }

    /// The same for a preempted or swapped sequence, which is resumed: returns it, Wait or Never. What was said of it when it was
    /// admitted still counts. Raises StaleHandle unless it is preempted or swapped.
    #[pyo3(signature = (sequence, *, waited=None))]
    fn try_resume<'py>(
        &self,
        py: Python<'py>,
        sequence: Bound<'py, PySequence>,
        waited: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let handle = sequence.get().handle_in(py, &self.shared, "try_resume")?;
        let ticket = self.shared.arguments(py, ticket(py, waited.as_ref()))?;
        match self.shared.change(py, |pager| pager.try_reenter(self.generation, handle, ticket))? {
            Verdict::In(()) => Ok(sequence.into_any()),
            Verdict::Wait(wait) => wait_of(py, wait, self.number),
            Verdict::Never { needed, usable } => never_of(py, needed, usable),
        }
    }

    /// The same for a swapped sequence, which is brought back from the host: returns the plan, as `Sequence.swap_in`, Wait or
    /// Never. Raises StaleHandle unless it is swapped.
    #[pyo3(signature = (sequence, *, waited=None))]
    fn try_swap_in<'py>(
        &self,
        py: Python<'py>,
        sequence: Bound<'py, PySequence>,
        waited: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let handle = sequence.get().handle_in(py, &self.shared, "try_swap_in")?;
        let ticket = self.shared.arguments(py, ticket(py, waited.as_ref()))?;
        let verdict = self.shared.change(py, |pager| {
            Ok(match pager.try_return(self.generation, handle, ticket)? {
                Verdict::In(id) => Verdict::In(Made::of(pager, id)),
                Verdict::Wait(wait) => Verdict::Wait(wait),
                Verdict::Never { needed, usable } => Verdict::Never { needed, usable },
            })
        })?;
        match verdict {
            Verdict::In(made) => made.build(py),
            Verdict::Wait(wait) => wait_of(py, wait, self.number),
            Verdict::Never { needed, usable } => never_of(py, needed, usable),
        }
    }

    /// A request that waits goes away: its client has gone, or its time is over. From now on it keeps nobody out.
    ///
    /// `waited` is any answer that it got. Nothing happens if it is not among those that wait: it came in, was given up
    /// before, or was answered once only. If it is asked about again with the same `waited`, it has its old place, and has not
    /// been passed over yet.
    ///
    /// Who is not given up is no danger: who is not asked about for 8 rounds (one ends when somebody is asked about a second
    /// time in it) keeps nobody out until he is, and his `passed_over` goes on. It begins anew for who is not asked about for
    /// 16,384 calls, or 64 for each that waits if that is more; no more than 4,096 that wait are watched at a time.
    ///
    /// Raises ValueError for the answer of another Admission, and if another one controls the pager now; TypeError for what is
    /// no Wait. Cost: a search among those that wait.
    fn give_up(&self, py: Python<'_>, waited: Bound<'_, PyAny>) -> PyResult<()> {
        let ticket = self.shared.arguments(py, self.own_ticket(py, &waited))?;
        self.shared.change(py, |pager| pager.give_up(self.generation, ticket))
    }

    /// What the pool will hold if nobody else comes in: steps from now (int64 [n]), and the mean and the standard
    /// deviation of the blocks that are held then (float64 [n] each).
    #[expect(clippy::type_complexity, reason = "three arrays")]
    fn outlook<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<f64>>, Bound<'py, PyArray1<f64>>)> {
        let points = self.shared.change(py, |pager| pager.outlook(self.generation))?;
        let steps = PyArray1::from_iter(py, points.iter().map(|point| i64::from(point.0)));
        let means = PyArray1::from_iter(py, points.iter().map(|point| point.1));
        Ok((steps, means, PyArray1::from_iter(py, points.iter().map(|point| point.2))))
    }

    /// The share of answers of a kind that have so many tokens or more, as far as is known now: float64 [n] for n `tokens`, a
    /// list or an integer array. ValueError for a kind that nobody has named.
    #[pyo3(signature = (tokens, kind=Given::NOTHING), text_signature = "($self, tokens, kind='')")]
    fn survival<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        kind: Given<'py>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        self.estimate(py, tokens, "tokens", &kind, Pager::survival)
    }

    /// How many tokens an answer of a kind that has so many, and no end, still gets on average, as far as is known now: float64
    /// [n] for n `answered`, a list or an integer array. ValueError for a kind that nobody has named.
    ///
    /// A batch job ends sooner if its last requests come in longest first: see `docs/load-control.md`.
    #[pyo3(signature = (answered, kind=Given::NOTHING), text_signature = "($self, answered, kind='')")]
    fn mean_left<'py>(
        &self,
        py: Python<'py>,
        answered: &Bound<'py, PyAny>,
        kind: Given<'py>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        self.estimate(py, answered, "answered", &kind, Pager::mean_left)
    }
}

impl PyAdmission {
    /// What is known of answers of a kind, for each of some lengths.
    fn estimate<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        argument: &str,
        kind: &Given<'py>,
        of: impl FnOnce(&mut Pager, u64, &str, &[u32]) -> Result<Vec<f64>> + Send,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        let kind = kind.get().cloned().unwrap_or_else(|| PyString::new(py, "").into_any());
        let Ok(kind) = kind.cast::<PyString>() else { return Err(wrong_type(&kind, "kind", "a str")) };
        let name = kind_name(kind)?;
        let tokens = numbers(tokens, argument)?;
        let tokens: Vec<u32> = tokens.into_iter().map(|length| length.max(0).cast_unsigned()).collect();
        let estimates = self.shared.change(py, |pager| of(pager, self.generation, name, &tokens))?;
        Ok(PyArray1::from_vec(py, estimates))
    }

    /// The ticket of an answer that this one gave.
    fn own_ticket(&self, py: Python<'_>, waited: &Bound<'_, PyAny>) -> PyResult<u64> {
        if !waited.is_instance(wait_class(py)?)? {
            return Err(wrong_type(waited, "waited", "a Wait"));
        }
        let own = waited.getattr("admission_number")?.extract::<u64>().is_ok_and(|number| number == self.number);
        match ticket(py, Some(waited))? {
            Some(ticket) if own => Ok(ticket),
            _ => Err(PyValueError::new_err("waited is the answer of another Admission: this one knows nothing of it")),
        }
    }
}

/// A length of an answer: 1 or more. One that no answer has is none at all.
fn length(given: Option<&Given<'_>>, name: &str) -> PyResult<Option<u32>> {
    given.map(|given| Ok(u32::try_from(given.count(name, 1)?).unwrap_or(u32::MAX))).transpose()
}

/// What a kind is called. It is remembered as long as the controller.
fn kind_name<'a>(kind: &'a Bound<'_, PyString>) -> PyResult<&'a str> {
    let name = kind.to_str()?;
    let length = name.chars().count();
    if length > KIND_CHARS_MAX {
        let message = format!("kind has {length} characters; it must have {KIND_CHARS_MAX} at most");
        return Err(PyValueError::new_err(message));
    }
    Ok(name)
}

/// Into how many a request is forked.
fn samples_of(given: &Given<'_>) -> PyResult<u16> {
    let count = given.count("samples", 1)?;
    u16::try_from(count).map_err(|_| PyValueError::new_err(format!("samples is {count}; it must be 1 to 65535")))
}

/// The ticket of a Wait.
fn ticket(py: Python<'_>, waited: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    let Some(waited) = waited else { return Ok(None) };
    if !waited.is_instance(wait_class(py)?)? {
        return Err(wrong_type(waited, "waited", "a Wait or None"));
    }
    let ticket = waited.getattr("ticket")?;
    match ticket.extract() {
        Ok(ticket) => Ok(Some(ticket)),
        Err(_) => {
            Err(PyValueError::new_err(format!("waited has the ticket {}; none was given like that", shown(&ticket)?)))
        }
    }
}

fn wait_class(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvpager.types", "Wait")
}

fn wait_of(py: Python<'_>, wait: Wait, admission: u64) -> PyResult<Bound<'_, PyAny>> {
    let Wait { reason, needed, available, ticket, passed_over } = wait;
    wait_class(py)?.call1((reason.name(), needed, available, passed_over, ticket, admission))
}

fn never_of(py: Python<'_>, needed: usize, usable: usize) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvpager.types", "Never")?.call1((needed, usable))
}
