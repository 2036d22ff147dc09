//! paced
fn main() {}
