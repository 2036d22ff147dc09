//! Where state is kept between runs.

use std::{env, path::PathBuf};

/// Returns the folder of development mode: `paced` in the user's state folder (XDG Base Directory), or in
/// `/var/lib` for a user without a home.
#[must_use]
pub fn development_dir() -> PathBuf {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    home.unwrap_or_else(|| PathBuf::from("/var/lib")).join("paced")
}
