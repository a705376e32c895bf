//! Reading an encoded namespace (`docs/design/rules.md` 13). The bindings write it.

/// What the caller gave.
#[derive(Clone, Debug)]
pub enum Namespace<'a> {
    /// A name.
    Bytes(&'a [u8]),
    /// (kind, value) pairs.
    Pairs(Pairs<'a>),
}

/// The (kind, value) pairs of a namespace.
#[derive(Clone, Debug)]
pub struct Pairs<'a>(&'a [u8]);

impl<'a> Iterator for Pairs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, rest) = take_field(self.0)?;
        let (value, rest) = take_field(rest)?;
        self.0 = rest;
        Some((kind, value))
    }
}

/// Reads an encoded namespace.
#[must_use]
pub fn decode(encoded: &[u8]) -> Namespace<'_> {
    match encoded.split_first() {
        Some((1, pairs)) => Namespace::Pairs(Pairs(pairs)),
        Some((_, name)) => Namespace::Bytes(name),
        None => Namespace::Bytes(&[]),
    }
}

fn take_field(encoded: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = encoded.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}
