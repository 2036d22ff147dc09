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
    let (mut clock, mut trims) = (interval(PERIOD), Trims::default());
    loop {
        clock.tick().await;
        trims = spawn_blocking(move || trims.after_look()).await.unwrap_or(trims);
    }
}

/// What malloc holds.
#[derive(Clone, Copy, Debug)]
struct Heap {
    /// Resident bytes that are free.
    freed_bytes: usize,
    /// Bytes of blocks in use.
    in_use_bytes: usize,
}

/// Decides when freed memory goes back.
#[derive(Clone, Copy, Debug)]
struct Trims {
    /// How much freed memory may stay. Pages that also contain blocks in use cannot go back, and do not count.
    may_stay_bytes: usize,
    /// How much was in use when memory last went back.
    in_use_bytes: usize,
}

impl Default for Trims {
    fn default() -> Self {
        Self { may_stay_bytes: MAY_STAY_BYTES, in_use_bytes: 0 }
    }
}

impl Trims {
    /// Whether freed memory has to go back: there is more than may stay, or so many blocks have been freed since the last time that pages
    /// which could not go back then may be free as a whole.
    fn is_due(&self, heap: Heap) -> bool {
        let freed_blocks_bytes = self.in_use_bytes.saturating_sub(heap.in_use_bytes);
        let few_bytes = MAY_STAY_BYTES.min(self.in_use_bytes / 8);
        heap.freed_bytes > self.may_stay_bytes || (heap.freed_bytes > MAY_STAY_BYTES && freed_blocks_bytes > few_bytes)
    }

    /// Notes what malloc holds after freed memory went back: the rest cannot go back for now.
    const fn done(&mut self, heap: Heap) {
        *self = Self { may_stay_bytes: MAY_STAY_BYTES + heap.freed_bytes, in_use_bytes: heap.in_use_bytes };
    }

    /// Lets less memory stay once blocks have taken what could not go back, of which at most `freed_bytes` are still free. Otherwise, as
    /// much could stay once they are freed.
    fn follow(&mut self, freed_bytes: usize) {
        self.may_stay_bytes = self.may_stay_bytes.min(MAY_STAY_BYTES + freed_bytes);
    }

    /// Gives freed memory back if that is due.
    fn after_look(mut self) -> Self {
        let resident_bytes = resident_bytes();
        // Without this, each look would walk through malloc's lists.
        if resident_bytes <= MAY_STAY_BYTES {
            self.follow(resident_bytes);
            return self;
        }
        let before = heap();
        self.follow(before.freed_bytes);
        if self.is_due(before) {
            // SAFETY: the call takes no pointer, and malloc allows it in every thread.
            unsafe { libc::malloc_trim(0) };
            let after = heap();
            let returned_bytes = before.freed_bytes.saturating_sub(after.freed_bytes);
            tracing::debug!("{} MiB of freed memory went back to the system", returned_bytes >> 20);
            self.done(after);
        }
        self
    }
}

/// Returns the resident bytes of the process that no file has; 0 if `/proc` does not tell.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    number(&status, "RssAnon:").map_or(0, |kib| kib as usize * 1024)
}

/// Returns what malloc holds. The free bytes are at most those of its arenas, some of which went back before.
fn heap() -> Heap {
    // SAFETY: the call takes no pointer, and malloc allows it in every thread.
    let malloc = unsafe { libc::mallinfo2() };
    let in_use_bytes = malloc.uordblks + malloc.hblkhd;
    Heap { freed_bytes: malloc.fordblks.min(resident_bytes().saturating_sub(in_use_bytes)), in_use_bytes }
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
        let freed = heap().freed_bytes;
        assert!(freed > BYTES / 2, "only {freed} bytes are free");
        _ = Trims { may_stay_bytes: freed * 2, ..Trims::default() }.after_look();
        assert!(resident_bytes() > full - BYTES / 4, "it stays while it is little");
        let trims = Trims::default().after_look();
        assert!(resident_bytes() < full - BYTES / 2, "{} bytes are left of {full}", resident_bytes());
        assert!(trims.may_stay_bytes < MAY_STAY_BYTES + BYTES / 4);
        assert!(!trims.is_due(heap()), "nothing is left to do");
        drop(black_box(blocks));
    }

    /// Looks one after another, each with the free MiB, the MiB in use, and the free MiB that are left if memory goes back. Returns for
    /// each whether it does.
    fn goes_back<const N: usize>(looks: [(usize, usize, usize); N]) -> [bool; N] {
        let mut trims = Trims::default();
        looks.map(|(freed, in_use, left)| {
            let heap = |freed| Heap { freed_bytes: freed << 20, in_use_bytes: in_use << 20 };
            trims.follow(freed << 20);
            let is_due = trims.is_due(heap(freed));
            if is_due {
                trims.done(heap(left));
            }
            is_due
        })
    }

    #[test]
    fn what_could_not_go_back_may_stay_only_until_blocks_have_taken_it_or_those_around_it_are_freed() {
        let little = [(64, 100, 0), (65, 100, 0), (64, 100, 0), (30, 10, 0)];
        assert_eq!(goes_back(little), [false, true, false, false]);
        let stuck = [(500, 300, 400), (464, 300, 0), (450, 280, 0), (465, 300, 401)];
        assert_eq!(goes_back(stuck), [true, false, false, true]);
        let taken = [(500, 300, 400), (10, 690, 0), (74, 626, 0), (75, 625, 0)];
        assert_eq!(goes_back(taken), [true, false, false, true]);
        let taken_in_part = [(500, 300, 400), (300, 400, 0), (364, 336, 0), (365, 335, 300)];
        assert_eq!(goes_back(taken_in_part), [true, false, false, true]);
        let freed_around = [(500, 300, 400), (450, 250, 410), (450, 220, 400), (450, 190, 0), (20, 100, 0)];
        assert_eq!(goes_back(freed_around), [true, true, false, true, false]);
        let freed_around_in_a_large_heap = [(500, 8_000, 400), (464, 7_936, 0), (464, 7_935, 0)];
        assert_eq!(goes_back(freed_around_in_a_large_heap), [true, false, true]);
    }
}
