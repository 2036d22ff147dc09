//! Where state is kept between runs.

use std::{env, path::PathBuf};

/// Returns the folder of development mode: `paced` in the user's state folder (XDG Base Directory), or for a user without
/// a home a folder in `/var/lib` that no service has.
#[must_use]
pub fn development_dir() -> PathBuf {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder(absolute("XDG_STATE_HOME"), absolute("HOME"))
}

fn folder(state_home: Option<PathBuf>, home: Option<PathBuf>) -> PathBuf {
    let state = state_home.or_else(|| home.map(|home| home.join(".local/state")));
    state.map_or_else(|| PathBuf::from("/var/lib/paced-development"), |state| state.join("paced"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn development_never_shares_the_folder_of_the_service() {
        let paths = |state: Option<&str>, home: Option<&str>| folder(state.map(Into::into), home.map(Into::into));
        assert_eq!(paths(Some("/s"), Some("/h")), PathBuf::from("/s/paced"));
        assert_eq!(paths(None, Some("/home/ada")), PathBuf::from("/home/ada/.local/state/paced"));
        let service = config::Config::from_toml("").unwrap().state_dir;
        assert!(!paths(None, None).starts_with(&service) && !service.starts_with(paths(None, None)));
    }
}
