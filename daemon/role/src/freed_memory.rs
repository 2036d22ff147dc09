//! Memory that the process has freed and that malloc keeps: given back to the system after a burst.
//!
//! glibc's `free` returns only the end of an arena, which a single small block can hold. After a flood of requests or a reload with many
//! names, most of an arena may therefore stay resident for as long as the process lives.

use std::{fs, time::Duration};

use tokio::{task::spawn_blocking, time::interval};

use crate::process_metrics::number;

/// How often the memory is looked at.
const PERIOD: Duration = Duration::from_secs(60);

/// Freed memory that may stay: the next burst needs it again, and giving it back stops allocations for some 10 ms.
const MAY_STAY_BYTES: usize = 64 << 20;

/// Gives freed memory back each minute, if there is much. Runs until it is dropped.
pub async fn keep_returning() {
    let (mut clock, mut may_stay_bytes) = (interval(PERIOD), MAY_STAY_BYTES);
    loop {
        clock.tick().await;
        let looked = spawn_blocking(move || return_beyond(may_stay_bytes)).await;
        may_stay_bytes = looked.unwrap_or(may_stay_bytes);
    }
}

/// Gives freed memory back if there is more than this. Returns how much may stay next time: more than now, if some cannot be given back.
fn return_beyond(may_stay_bytes: usize) -> usize {
    // Without this, each look would walk through malloc's lists.
    if resident_bytes() <= may_stay_bytes {
        return may_stay_bytes;
    }
    let before = freed_bytes();
    if before <= may_stay_bytes {
        return may_stay_bytes;
    }
    // SAFETY: the call takes no pointer, and malloc allows it in every thread.
    unsafe { libc::malloc_trim(0) };
    let after = freed_bytes();
    tracing::debug!("{} MiB of freed memory went back to the system", before.saturating_sub(after) >> 20);
    MAY_STAY_BYTES + after
}

/// Returns the resident bytes of the process that no file has; 0 if `/proc` does not tell.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    number(&status, "RssAnon:").map_or(0, |kib| kib as usize * 1024)
}

/// Returns about how many resident bytes malloc keeps free: at most the free ones of its arenas, some of which went back before.
fn freed_bytes() -> usize {
    // SAFETY: the call takes no pointer, and malloc allows it in every thread.
    let malloc = unsafe { libc::mallinfo2() };
    let in_use = malloc.uordblks + malloc.hblkhd;
    malloc.fordblks.min(resident_bytes().saturating_sub(in_use))
}

#[cfg(test)]
mod tests {
    use std::{hint::black_box, iter::repeat_with};

    use super::*;

    #[test]
    fn freed_memory_between_blocks_in_use_goes_back_once_there_is_much() {
        const BYTES: usize = 200 << 20;
        let mut blocks: Vec<_> = repeat_with(|| black_box(vec![1_u8; 1_000])).take(BYTES / 1_000).collect();
        let full = resident_bytes();
        assert!(full > BYTES);
        // One block in hundred keeps its place.
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 100 == 0
        });
        let freed = freed_bytes();
        assert!(freed > BYTES / 2, "only {freed} bytes are free");
        assert_eq!(return_beyond(freed * 2), freed * 2);
        assert!(resident_bytes() > full - BYTES / 4, "it stays while it is little");
        let may_stay_bytes = return_beyond(MAY_STAY_BYTES);
        assert!(resident_bytes() < full - BYTES / 2, "{} bytes are left of {full}", resident_bytes());
        assert!(may_stay_bytes < MAY_STAY_BYTES + BYTES / 4);
        assert_eq!(return_beyond(may_stay_bytes), may_stay_bytes, "nothing is left to do");
        drop(black_box(blocks));
    }
}
