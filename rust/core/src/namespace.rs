//! Reading an encoded namespace (`docs/design/rules.md` 13). The bindings write it.

/// What the caller gave.
#[derive(Debug)]
pub enum Namespace<'a> {
    /// A name.
    Bytes(&'a [u8]),
    /// (kind, value) pairs.
    Pairs(Vec<(&'a [u8], &'a [u8])>),
}

/// Reads an encoded namespace.
#[must_use]
pub fn decode(encoded: &[u8]) -> Namespace<'_> {
    let (tag, mut rest) = encoded.split_first().unwrap_or((&0, &[]));
    if *tag == 0 {
        return Namespace::Bytes(rest);
    }
    let mut pairs = Vec::new();
    while let Some((kind, after)) = take_field(rest)
        && let Some((value, after)) = take_field(after)
    {
        pairs.push((kind, value));
        rest = after;
    }
    Namespace::Pairs(pairs)
}

fn take_field(encoded: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = encoded.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}
