//! The sk_reuseport program: of workers that share an address, each gets the packets of its own connections.

use std::{
    os::fd::{AsFd, AsRawFd},
    thread::sleep,
    time::{Duration, Instant},
};

use aya::{
    maps::{Array, MapError, ReusePortSockArray},
    programs::SkReuseport,
};

use crate::{
    connection_id::{IdKeys, set_keys},
    error::{Cause, Circumstances, Error},
    loaded::Loaded,
    syscall::set_option,
};

/// The compiled program with its maps, as an ELF object that libbpf and `bpftool prog loadall` accept as well.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));

/// The program's name, as `bpftool prog` shows it.
pub const PROGRAM: &str = "paced_steer";

/// The loaded program. Sockets that it is attached to keep it for as long as they live.
#[derive(Debug)]
pub struct Steer {
    loaded: Loaded<SkReuseport>,
}

impl Steer {
    /// Loads the program and attaches it to a group of sockets: all are bound to one address with `SO_REUSEPORT`, and
    /// their positions are the workers' numbers, which must not change while connections live. A program that an
    /// earlier process attached to them is detached; it may take a while until the kernel has freed their places in its
    /// array.
    ///
    /// # Errors
    /// The kernel refuses, mostly for lack of CAP_BPF, or the sockets are not such a group.
    pub fn attach<S: AsFd + AsRawFd>(workers: &[S], keys: &[(u8, IdKeys)]) -> Result<Self, Error> {
        let refused = |cause: Cause| Error::Load { program: PROGRAM, circumstances: Circumstances::now(), cause };
        let mut steer = Self { loaded: Loaded::new(PROGRAM, OBJECT, &[], SkReuseport::load)? };
        steer.set_keys(keys)?;
        let map = steer
            .loaded
            .ebpf
            .map_mut(WORKERS)
            .ok_or_else(|| broken(WORKERS, "the object file has no map of this name"))?;
        let mut sockets = ReusePortSockArray::try_from(map).map_err(|error| broken(WORKERS, error))?;
        if let Some(worker) = workers.first() {
            detach(worker);
        }
        let until = Instant::now() + FORGETTING;
        for (number, worker) in (0..).zip(workers) {
            while let Err(error) = sockets.set(number, worker, 0) {
                if !has_a_place(&error) || Instant::now() > until {
                    return Err(broken(WORKERS, error));
                }
                sleep(Duration::from_millis(5));
            }
        }
        if let Some(worker) = workers.first() {
            steer.loaded.program_mut().and_then(|program| Ok(program.attach(worker)?)).map_err(refused)?;
        }
        Ok(steer)
    }

    /// Sets the keys that identify our connection IDs: each by its config, 0 to 7. Configs that are not named keep their keys.
    ///
    /// # Errors
    /// The kernel refuses an update.
    pub fn set_keys(&mut self, keys: &[(u8, IdKeys)]) -> Result<(), Error> {
        let map =
            self.loaded.ebpf.map_mut(IDS).ok_or_else(|| broken(IDS, "the object file has no map of this name"))?;
        let mut ids = Array::try_from(map).map_err(|error| broken(IDS, error))?;
        set_keys(&mut ids, keys).map_err(|error| broken(IDS, error))
    }
}

/// How long the kernel may take to free the places in a detached program's array.
const FORGETTING: Duration = Duration::from_secs(5);

/// Detaches the program of a socket's group, if it has one.
fn detach(worker: &impl AsFd) {
    // ENOENT means that there was none.
    _ = set_option(worker, libc::SOL_SOCKET, libc::SO_DETACH_REUSEPORT_BPF, 0);
}

/// Returns whether a socket could not be added because it has a place in another array (kernel/bpf/reuseport_array.c).
fn has_a_place(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.raw_os_error() == Some(libc::EBUSY))
}

const IDS: &str = "paced_ids";
const WORKERS: &str = "paced_workers";

fn broken(map: &'static str, cause: impl Into<Cause>) -> Error {
    Error::Map { program: PROGRAM, map, cause: cause.into() }
}
