//! Arguments whose errors should speak for themselves.

use kvpager_core::PolicyKind;
use kvpager_core::config::{POLICIES, WATERMARK_LIMITS};
use kvpager_core::preemptions::{REASON_MAX, Why};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PySequence, PyString, PyTuple};

use crate::errors::{config_error, shown};

/// What a position is, in the words of an error.
pub const POSITION: &str = "a position, 0 or more and at most the sequence's length";

/// An argument as given, or nothing where a default stands in. (With `Option`, None itself would be taken for the
/// default.)
pub struct Given<'py>(Option<Bound<'py, PyAny>>);

impl Given<'_> {
    /// The default stands in.
    pub const NOTHING: Self = Self(None);
}

impl<'a, 'py> FromPyObject<'a, 'py> for Given<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(Some(object.to_owned())))
    }
}

impl<'py> Given<'py> {
    /// The argument, if there is one.
    pub fn get(&self) -> Option<&Bound<'py, PyAny>> {
        self.0.as_ref()
    }

    /// A position or a count: an integer that is not negative. The error names its `limits`.
    pub fn position(&self, name: &str, default: usize, limits: &str) -> PyResult<usize> {
        let Some(value) = self.get() else { return Ok(default) };
        match integer(value, name)? {
            Some(position) => Ok(position),
            None => Err(PyValueError::new_err(format!("{name} is {}; it must be {limits}", shown(value)?))),
        }
    }

    /// How many: an integer of 1 or more. What no machine has so many of is as good as infinite.
    pub fn count(&self, name: &str, default: usize) -> PyResult<usize> {
        let Some(value) = self.get() else { return Ok(default) };
        let index = index_of(value, name)?;
        let count = index.extract().unwrap_or(if index.gt(0)? { usize::MAX } else { 0 });
        if count > 0 {
            return Ok(count);
        }
        Err(PyValueError::new_err(format!("{name} is {}; it must be 1 or more", shown(value)?)))
    }

    /// A setting that is an integer: what does not fit its type is outside every limit.
    pub fn setting<T>(&self, name: &str, default: T, limits: &str) -> PyResult<T>
    where
        T: for<'a> FromPyObject<'a, 'py>,
    {
        let Some(value) = self.get() else { return Ok(default) };
        match integer(value, name)? {
            Some(setting) => Ok(setting),
            None => Err(outside(value, name, limits)?),
        }
    }

    /// The watermark.
    pub fn watermark(&self) -> PyResult<f64> {
        self.share("watermark", 0.0, WATERMARK_LIMITS)
    }

    /// A share of something.
    pub fn share(&self, name: &str, default: f64, limits: &str) -> PyResult<f64> {
        let Some(value) = self.get() else { return Ok(default) };
        match number(value, name)? {
            Some(share) => Ok(share),
            None => Err(outside(value, name, limits)?),
        }
    }

    /// Why a sequence is preempted: its `reason` is this argument, the cost the other one.
    pub fn why(&self, cost: &Self) -> PyResult<Why> {
        let reason = match self.get() {
            None => String::new(),
            Some(value) => {
                let Ok(reason) = value.cast::<PyString>() else { return Err(wrong_type(value, "reason", "a str")) };
                reason.to_str()?.to_owned()
            }
        };
        let length = reason.chars().count();
        if length > REASON_MAX {
            let message = format!("reason has {length} characters; it must have {REASON_MAX} at most");
            return Err(PyValueError::new_err(message));
        }
        let Some(value) = cost.get() else { return Ok(Why { reason: reason.into(), cost: 0.0 }) };
        let cost = number(value, "cost")?.filter(|cost| (0.0..f64::INFINITY).contains(cost));
        let Some(cost) = cost else {
            let message = format!("cost is {}; it must be a finite number, 0 or more", shown(value)?);
            return Err(PyValueError::new_err(message));
        };
        Ok(Why { reason: reason.into(), cost })
    }

    /// The policy.
    pub fn policy(&self) -> PyResult<PolicyKind> {
        let Some(value) = self.get() else { return Ok(PolicyKind::Lru) };
        let Ok(name) = value.cast::<PyString>() else {
            return Err(wrong_type(value, "policy", "a str"));
        };
        // Text that is no UTF-8 (a lone surrogate) is no policy's name.
        match name.to_str().ok().and_then(|name| PolicyKind::from_name(name).ok()) {
            Some(policy) => Ok(policy),
            None => Err(outside(value, "policy", POLICIES)?),
        }
    }

    /// Yes or no: a bool, numpy's included.
    pub fn flag(&self, name: &str, default: bool) -> PyResult<bool> {
        let Some(value) = self.get() else { return Ok(default) };
        if is_bool(value)? { value.is_truthy() } else { Err(wrong_type(value, name, "a bool")) }
    }

    /// Bytes.
    pub fn bytes(&self, name: &str) -> PyResult<Option<&[u8]>> {
        let Some(value) = self.get() else { return Ok(None) };
        value.cast::<PyBytes>().map(|bytes| Some(bytes.as_bytes())).map_err(|_| wrong_type(value, name, "bytes"))
    }
}

/// A moment of the caller's clock.
pub fn tick(value: &Bound<'_, PyAny>, name: &str) -> PyResult<u64> {
    if let Some(tick) = integer::<i64>(value, name)?.and_then(|tick| u64::try_from(tick).ok()) {
        return Ok(tick);
    }
    Err(PyValueError::new_err(format!("{name} is {}; it must be 0 to 9223372036854775807", shown(value)?)))
}

/// A number of something, 0 or more. One that is too large to count with is as good as the largest.
pub fn amount(value: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let index = index_of(value, name)?;
    if index.lt(0)? {
        return Err(PyValueError::new_err(format!("{name} is {}; it must be 0 or more", shown(value)?)));
    }
    Ok(index.extract().unwrap_or(usize::MAX))
}

/// A number; none if it is an int that no float holds. A bool is none, nor is what Python would read from text.
pub fn number(value: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<f64>> {
    if is_bool(value)? {
        return Err(wrong_type(value, name, "a number"));
    }
    match value.extract() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => Ok(None),
        Err(error) if error.is_instance_of::<PyTypeError>(value.py()) => Err(wrong_type(value, name, "a number")),
        Err(error) => Err(error),
    }
}

/// An integer within limits, for which the error is a `ValueError`.
pub fn within(value: &Bound<'_, PyAny>, name: &str, least: i64, most: i64) -> PyResult<i64> {
    match integer(value, name)? {
        Some(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(PyValueError::new_err(format!("{name} is {}; it must be {least} to {most}", shown(value)?))),
    }
}

/// The items of a list, tuple or other sequence that is no text.
pub fn items<'py>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyTuple>> {
    items_of(value, name, "a list or tuple")
}

/// The same where the error expects something else.
pub fn items_of<'py>(value: &Bound<'py, PyAny>, name: &str, expected: &str) -> PyResult<Bound<'py, PyTuple>> {
    let is_text = value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>();
    match value.cast::<PySequence>() {
        Ok(items) if !is_text => items.to_tuple(),
        _ => Err(wrong_type(value, name, expected)),
    }
}

/// A `TypeError` that names the argument.
pub fn wrong_type(value: &Bound<'_, PyAny>, name: &str, expected: &str) -> PyErr {
    match value.get_type().name() {
        Ok(kind) => PyTypeError::new_err(format!("{name} must be {expected}, not {kind}")),
        Err(error) => error,
    }
}

/// A `ConfigError` that names the setting, its value and its limits.
fn outside(value: &Bound<'_, PyAny>, name: &str, limits: &str) -> PyResult<PyErr> {
    Ok(config_error(value.py(), format!("{name} is {}; it must be {limits}", shown(value)?)))
}

/// Is it a bool, of Python or numpy?
pub fn is_bool(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    if value.is_instance_of::<PyBool>() {
        return Ok(true);
    }
    let kind = value.get_type();
    Ok(kind.name()?.to_cow()?.starts_with("bool") && kind.module()?.to_cow()? == "numpy")
}

/// The value of anything that stands for an integer and is no bool; None if it does not fit.
fn integer<'py, T: for<'a> FromPyObject<'a, 'py>>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<T>> {
    Ok(index_of(value, name)?.extract().ok())
}

/// What anything that stands for an integer and is no bool stands for.
fn index_of<'py>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let mut index = value.clone();
    if !value.is_instance_of::<PyBool>() && value.hasattr("__index__")? {
        index = value.call_method0("__index__")?;
        // One that answers with text, say, is no integer out of range, but none at all.
        if index.is_instance_of::<PyInt>() {
            return Ok(index);
        }
    }
    Err(wrong_type(&index, name, "an integer"))
}
