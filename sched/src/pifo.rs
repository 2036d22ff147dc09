//! A push-in-first-out queue: entries enter anywhere, by rank, and leave only at the head ("Programmable Packet
//! Scheduling at Line Rate", SIGCOMM 2016).
//!
//! Keys pushed one after the other with the same rank form a *run*, a linked list; a binary heap orders the runs by
//! rank, then by age. So a queue in which all ranks are equal, which is what round robin makes, is a plain FIFO whose
//! operations cost O(1), and one in which no two are equal is a plain heap.

/// Ends a run.
const NONE: u32 = u32::MAX;

/// A queue of keys ordered by rank; the smallest rank leaves first, equal ranks leave in push order.
///
/// Keys are small integers below `u32::MAX`, such as slab indices: memory grows with the largest key ever pushed
/// (12 bytes each) and with the number of runs. A change costs O(log runs) and allocates only when one of the two
/// reaches a new height.
#[derive(Clone, Debug)]
pub struct Pifo<R = u64> {
    heap: Vec<Run<R>>,
    nodes: Vec<Node>,
    /// The newest key of the newest run and their rank: where another key of that rank may be appended.
    newest: Option<(u32, R)>,
    pushes: u64,
    len: usize,
}

/// Ordered by its fields from top to bottom; `push` is unique, so `head` never decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Run<R> {
    rank: R,
    push: u64,
    head: u32,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    place: Place,
    next: u32,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Not queued.
    Out,
    /// The head of the run in this heap slot.
    Head(u32),
    /// Behind this key of the same run.
    Behind(u32),
}

impl<R: Ord + Copy> Pifo<R> {
    /// Creates an empty queue without allocating.
    #[must_use]
    pub const fn new() -> Self {
        Self { heap: Vec::new(), nodes: Vec::new(), newest: None, pushes: 0, len: 0 }
    }

    /// Queues `key` behind everything of the same or a smaller rank. A key that is already queued moves there.
    pub fn push(&mut self, key: u32, rank: R) {
        self.remove(key);
        if key as usize >= self.nodes.len() {
            self.nodes.resize(key as usize + 1, Node { place: Place::Out, next: NONE });
        }
        match self.newest.replace((key, rank)) {
            Some((last, same)) if same == rank => {
                self.nodes[last as usize].next = key;
                self.nodes[key as usize] = Node { place: Place::Behind(last), next: NONE };
            }
            _ => {
                let run = Run { rank, push: self.pushes, head: key };
                self.nodes[key as usize].next = NONE;
                self.heap.push(run);
                self.settle(run, self.heap.len() - 1);
            }
        }
        self.pushes += 1;
        self.len += 1;
    }

    /// Returns the key that leaves next, and its rank.
    #[must_use]
    pub fn peek(&self) -> Option<(u32, R)> {
        self.heap.first().map(|run| (run.head, run.rank))
    }

    /// Removes and returns the key that leaves next, and its rank.
    pub fn pop(&mut self) -> Option<(u32, R)> {
        let head = self.peek()?;
        self.remove(head.0);
        Some(head)
    }

    /// Removes `key` wherever it is. Returns whether it was queued.
    pub fn remove(&mut self, key: u32) -> bool {
        let Some(node) = self.nodes.get_mut(key as usize) else { return false };
        let Node { place, next } = *node;
        node.place = Place::Out;
        let before = match place {
            Place::Out => return false,
            Place::Behind(before) => {
                self.nodes[before as usize].next = next;
                Some(before)
            }
            Place::Head(slot) if next == NONE => {
                self.remove_run(slot as usize);
                None
            }
            Place::Head(slot) => {
                self.heap[slot as usize].head = next;
                None
            }
        };
        if next != NONE {
            self.nodes[next as usize].place = place;
        }
        if let Some((last, rank)) = self.newest
            && last == key
        {
            self.newest = before.map(|before| (before, rank));
        }
        self.len -= 1;
        true
    }

    /// Tells whether `key` is queued.
    #[must_use]
    pub fn contains(&self, key: u32) -> bool {
        self.nodes.get(key as usize).is_some_and(|node| !matches!(node.place, Place::Out))
    }

    /// Returns how many keys are queued.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Tells whether no key is queued.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn remove_run(&mut self, slot: usize) {
        self.heap.swap_remove(slot);
        if let Some(&moved) = self.heap.get(slot) {
            self.settle(moved, slot);
        }
    }

    /// Writes `run` where it belongs, starting from the hole at `slot`: up past larger parents, or down past smaller
    /// children.
    fn settle(&mut self, run: Run<R>, mut slot: usize) {
        while slot > 0
            && let parent = (slot - 1) / 2
            && run < self.heap[parent]
        {
            self.place(self.heap[parent], slot);
            slot = parent;
        }
        while let Some((child, smallest)) = self.smallest_child(slot)
            && smallest < run
        {
            self.place(smallest, slot);
            slot = child;
        }
        self.place(run, slot);
    }

    fn smallest_child(&self, slot: usize) -> Option<(usize, Run<R>)> {
        (2 * slot + 1..self.heap.len()).take(2).map(|child| (child, self.heap[child])).min_by_key(|(_, run)| *run)
    }

    fn place(&mut self, run: Run<R>, slot: usize) {
        self.heap[slot] = run;
        self.nodes[run.head as usize].place = Place::Head(slot as u32);
    }
}

impl<R: Ord + Copy> Default for Pifo<R> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(u32, u64),
        Pop,
        Remove(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..40u32, 0..6u64).prop_map(|(key, rank)| Step::Push(key, rank)),
            2 => Just(Step::Pop),
            1 => (0..45u32).prop_map(Step::Remove),
        ]
    }

    /// The same queue as a list kept in order: slow and obvious.
    #[derive(Default)]
    struct Sorted(Vec<(u32, u64)>);

    impl Sorted {
        fn push(&mut self, key: u32, rank: u64) {
            self.remove(key);
            let place = self.0.partition_point(|queued| queued.1 <= rank);
            self.0.insert(place, (key, rank));
        }

        fn pop(&mut self) -> Option<(u32, u64)> {
            (!self.0.is_empty()).then(|| self.0.remove(0))
        }

        fn remove(&mut self, key: u32) -> bool {
            let place = self.0.iter().position(|queued| queued.0 == key);
            place.map(|place| self.0.remove(place)).is_some()
        }
    }

    proptest! {
        #[test]
        fn the_queue_behaves_as_a_stable_sorted_list(steps in prop::collection::vec(step(), 0..200)) {
            let (mut queue, mut list) = (Pifo::new(), Sorted::default());
            for step in steps {
                match step {
                    Step::Push(key, rank) => {
                        queue.push(key, rank);
                        list.push(key, rank);
                    }
                    Step::Pop => prop_assert_eq!(queue.pop(), list.pop()),
                    Step::Remove(key) => prop_assert_eq!(queue.remove(key), list.remove(key)),
                }
                prop_assert_eq!(queue.peek(), list.0.first().copied());
                prop_assert_eq!(queue.len(), list.0.len());
                prop_assert_eq!(queue.is_empty(), list.0.is_empty());
                for key in 0..45 {
                    prop_assert_eq!(queue.contains(key), list.0.iter().any(|queued| queued.0 == key));
                }
            }
            while let Some(head) = list.pop() {
                prop_assert_eq!(queue.pop(), Some(head));
            }
            prop_assert_eq!(queue.pop(), None);
        }
    }

    #[test]
    fn a_key_pushed_again_moves_behind_its_equals() {
        let mut queue = Pifo::new();
        for key in [7, 3, 5] {
            queue.push(key, 1u64);
        }
        queue.push(7, 1);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(key, _)| key).collect();
        assert_eq!(order, [3, 5, 7]);
    }
}
