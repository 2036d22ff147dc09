//! Which users can read a file that a configuration names.

use std::{
    ffi::CString,
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use nix::unistd::{Gid, Uid, User, getgrouplist};

/// A user and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUser {
    /// The user's number.
    pub uid: u32,
    /// The numbers of its groups.
    pub gids: Vec<u32>,
}

impl FileUser {
    /// Returns the user of the service, to whom the state folder belongs, with its groups by the user database; if that does not know the
    /// user, with the folder's group. `None` if the folder does not exist or belongs to root.
    #[must_use]
    pub fn of_service(state_dir: &Path) -> Option<Self> {
        let folder = fs::metadata(state_dir).ok()?;
        let uid = folder.uid();
        (uid != 0).then(|| Self { uid, gids: groups(uid).unwrap_or_else(|| vec![folder.gid()]) })
    }

    /// Whether the mode of a file or folder gives this user the right whose bit for others is `bit` (4 to read, 1 to look into).
    fn has(&self, about: &Metadata, bit: u32) -> bool {
        let shift = match () {
            () if about.uid() == self.uid => 6,
            () if self.gids.contains(&about.gid()) => 3,
            () => 0,
        };
        about.mode() & (bit << shift) != 0
    }

    /// Whether this user can read a file, as far as the modes of the file and of the folders above it tell. True if that cannot be
    /// found out.
    #[must_use]
    pub fn can_read(&self, file: &Path) -> bool {
        let Ok(file) = fs::canonicalize(file) else { return true };
        let has = |path: &Path, bit| fs::metadata(path).map_or(true, |about| self.has(&about, bit));
        has(&file, 4) && file.ancestors().skip(1).all(|folder| has(folder, 1))
    }
}

/// Returns the groups of a user; `None` if the user database does not know it or does not answer.
fn groups(uid: u32) -> Option<Vec<u32>> {
    let user = User::from_uid(Uid::from_raw(uid)).ok()??;
    let name = CString::new(user.name).ok()?;
    let groups = getgrouplist(&name, user.gid).ok()?;
    Some(groups.into_iter().map(Gid::as_raw).collect())
}

/// Whether every user of this machine can read a file, as far as its mode tells.
#[must_use]
pub fn is_public(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|about| state::is_public(&about))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_groups_of_a_user_are_those_of_the_user_database() {
        assert_eq!(groups(0).as_deref().map(|groups| groups.contains(&0)), Some(true), "root is in its own group");
        assert_eq!(groups(u32::MAX - 7), None, "no such user");
    }

    #[test]
    fn the_mode_of_the_file_and_of_each_folder_above_decides() {
        let folder = std::env::temp_dir().join(format!("paced-readable-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("key");
        fs::write(&file, "").unwrap();
        let owner = fs::metadata(&file)
            .map(|about| FileUser { uid: about.uid(), gids: vec![about.gid() + 7, about.gid()] })
            .unwrap();
        let member = FileUser { uid: owner.uid + 1, ..owner.clone() };
        let other = FileUser { uid: owner.uid + 1, gids: vec![owner.gids[0]] };
        for (of_folder, of_file, readers, public) in [
            (0o755, 0o600, [true, false, false], false),
            (0o755, 0o640, [true, true, false], false),
            (0o755, 0o644, [true, true, true], true),
            (0o755, 0o004, [false, false, true], true),
            (0o750, 0o644, [true, true, false], true),
        ] {
            fs::set_permissions(&folder, PermissionsExt::from_mode(of_folder)).unwrap();
            fs::set_permissions(&file, PermissionsExt::from_mode(of_file)).unwrap();
            let found = [&owner, &member, &other].map(|user| user.can_read(&file));
            assert_eq!((found, is_public(&file)), (readers, public), "{of_folder:o} {of_file:o}");
        }
        fs::remove_dir_all(folder).unwrap();
        assert!(other.can_read(&file), "another check says that the file is missing");
    }
}
