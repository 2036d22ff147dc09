//! Splits an input into the values that a target needs.

use bytes::Bytes;

/// Takes the first byte as a number below `limit`; returns 0 if the input is empty.
pub fn choice(input: &mut &[u8], limit: u8) -> u8 {
    let Some((first, rest)) = input.split_first() else { return 0 };
    *input = rest;
    first % limit
}

/// Cuts bytes into pieces whose lengths depend on `seed`, as a network may cut a stream.
pub fn pieces(mut bytes: Bytes, seed: u8) -> impl Iterator<Item = Bytes> {
    let mut lens = [1, usize::from(seed), 2, usize::from(seed >> 4) + 1, 17].into_iter().cycle();
    std::iter::from_fn(move || {
        let len = lens.next()?.max(1).min(bytes.len());
        (!bytes.is_empty()).then(|| bytes.split_to(len))
    })
}
