//! Memory for arriving messages that is mapped for an endpoint, and unmapped with it.

use std::{
    ffi::c_void,
    io,
    ops::{Deref, DerefMut},
    ptr::{NonNull, null_mut},
    slice,
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Zeroed memory of its own. A page of it takes memory from its first use on.
///
/// The allocator would keep memory of this size for the next endpoint, and clear it as a whole before that: each endpoint that a reload
/// replaces would leave its buffers behind, and the next one would have all of its own in memory, although a packet of 1,500 bytes needs
/// only one page of its buffer's 64 KiB.
#[derive(Debug)]
pub(super) struct Mapping {
    begin: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns the memory, as a `Vec` does, and changes it only through `&mut self`.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps so many bytes without huge pages. Where the kernel gives huge pages unasked, the first packet in each 2 MiB would make it clear
    /// all of that at once: packets that were due meanwhile left in one train (4.4 ms in the lab).
    ///
    /// # Errors
    /// The kernel has no room for it.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: where the kernel chooses the address, a new mapping changes no memory that is in use.
        let begin =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }?;
        // SAFETY: the advice changes how the kernel backs the memory, not its contents. A kernel without huge pages refuses the advice and
        // does not need it. `rustix` offers no safe call, because other advice discards contents.
        _ = unsafe { madvise(begin, bytes, Advice::LinuxNoHugepage) };
        let begin = NonNull::new(begin.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { begin, bytes })
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the kernel has zeroed these bytes, they stay mapped as long as `self`, and only `&mut self` changes them.
        unsafe { slice::from_raw_parts(self.begin.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Mapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and nothing else refers to them.
        unsafe { slice::from_raw_parts_mut(self.begin.as_ptr(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to these bytes any more.
        _ = unsafe { munmap(self.begin.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::skipped;

    const BYTES: usize = 8 << 20;

    /// Returns the value of a field of the mapping that contains an address, from /proc/self/smaps (proc(5)).
    fn field(address: usize, name: &str) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_here = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let parsed = range.map(|(begin, end)| [begin, end].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(begin), Ok(end)]) = parsed {
                is_here = (begin..end).contains(&address);
            } else if let Some(value) = line.strip_prefix(name).filter(|_| is_here) {
                return value.trim_start_matches(':').trim().to_owned();
            }
        }
        panic!("no mapping holds {address:#x}");
    }

    #[test]
    fn buffers_are_no_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            skipped("buffers_are_no_huge_pages", "this kernel has no huge pages");
            return;
        }
        let buffers = Mapping::new(BYTES).unwrap();
        for place in [0, BYTES / 2, BYTES - 1] {
            let flags = field(&raw const buffers[place] as usize, "VmFlags");
            assert!(flags.split(' ').any(|flag| flag == "nh"), "{place}: {flags}");
        }
    }

    #[test]
    fn buffers_take_no_memory_before_packets_arrive_although_others_were_used_before() {
        for _ in 0..3 {
            Mapping::new(BYTES).unwrap().fill(1);
        }
        let buffers = Mapping::new(BYTES).unwrap();
        let resident_kb: usize = field(buffers.as_ptr() as usize, "Rss").trim_end_matches(" kB").parse().unwrap();
        assert!(resident_kb < BYTES / 1024 / 2, "{resident_kb} kB");
        assert!(buffers.iter().all(|byte| *byte == 0));
    }
}
