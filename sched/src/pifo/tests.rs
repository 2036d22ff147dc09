use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;

/// The same queue, slow and obvious: all keys in a map ordered by rank, then by age.
#[derive(Default)]
struct Model {
    queue: BTreeMap<(u64, u64), u32>,
    places: HashMap<u32, (u64, u64)>,
    pushes: u64,
}

impl Model {
    fn push(&mut self, key: u32, rank: u64) {
        self.remove(key);
        self.pushes += 1;
        self.queue.insert((rank, self.pushes), key);
        self.places.insert(key, (rank, self.pushes));
    }

    fn peek(&self) -> Option<(u32, u64)> {
        self.queue.first_key_value().map(|((rank, _), key)| (*key, *rank))
    }

    fn pop(&mut self) -> Option<(u32, u64)> {
        let head = self.peek()?;
        self.remove(head.0);
        Some(head)
    }

    fn remove(&mut self, key: u32) -> bool {
        self.places.remove(&key).is_some_and(|place| self.queue.remove(&place).is_some())
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % bound
    }
}

/// Ranks that crowd together, ranks of all sizes, and either kind behind the head, as fair queueing produces
/// them.
fn rank(random: &mut Random, head: Option<(u32, u64)>) -> u64 {
    let spread = [1, 8, 1_000, 1 << 20, 1 << 44, u64::MAX][random.below(6) as usize];
    let from = if random.below(3) > 0 { head.map_or(0, |(_, rank)| rank) } else { 0 };
    from.saturating_add(random.below(spread))
}

#[test]
fn a_million_random_operations_do_what_an_ordered_map_does() {
    let mut random = Random(1);
    let (mut queue, mut model) = (Pifo::new(), Model::default());
    for operation in 0..1_000_000 {
        // The queue grows to thousands of entries and shrinks to nothing, four times.
        let growing = operation / 125_000 % 2 == 0;
        match random.below(8) {
            0..4 if growing => {
                let (key, rank) = (random.below(20_000) as u32, rank(&mut random, model.peek()));
                queue.push(key, rank);
                model.push(key, rank);
            }
            4 => {
                let key = random.below(20_000) as u32;
                assert_eq!(queue.contains(key), model.places.contains_key(&key));
                assert_eq!(queue.remove(key), model.remove(key));
            }
            5 => {
                let Some((key, _)) = model.peek() else { continue };
                let rank = rank(&mut random, model.peek());
                queue.push(key, rank);
                model.push(key, rank);
            }
            6 if growing => {}
            _ => assert_eq!(queue.pop(), model.pop()),
        }
        assert_eq!(queue.peek(), model.peek());
        assert_eq!(queue.len(), model.queue.len());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(u32, u64),
    Pop,
    Remove(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..40u32, prop_oneof![0..6u64, any::<u64>()]).prop_map(|(key, rank)| Step::Push(key, rank)),
        2 => Just(Step::Pop),
        1 => (0..45u32).prop_map(Step::Remove),
    ]
}

proptest! {
    #[test]
    fn a_short_queue_does_what_an_ordered_map_does(steps in prop::collection::vec(step(), 0..300)) {
        let (mut queue, mut model) = (Pifo::new(), Model::default());
        for step in steps {
            match step {
                Step::Push(key, rank) => {
                    queue.push(key, rank);
                    model.push(key, rank);
                }
                Step::Pop => prop_assert_eq!(queue.pop(), model.pop()),
                Step::Remove(key) => prop_assert_eq!(queue.remove(key), model.remove(key)),
            }
            prop_assert_eq!(queue.peek(), model.peek());
            prop_assert_eq!(queue.len(), model.queue.len());
            prop_assert_eq!(queue.is_empty(), model.queue.is_empty());
            for key in 0..45 {
                prop_assert_eq!(queue.contains(key), model.places.contains_key(&key));
            }
        }
        while let Some(head) = model.pop() {
            prop_assert_eq!(queue.pop(), Some(head));
        }
        prop_assert_eq!(queue.pop(), None);
    }

    #[test]
    fn equal_ranks_leave_in_push_order_in_a_queue_of_any_length(
        ranks in prop::collection::vec(prop_oneof![0..4u64, (0..4u64).prop_map(|rank| rank << 40)], 1..3_000),
    ) {
        let mut queue = Pifo::new();
        for (key, rank) in (0..).zip(&ranks) {
            queue.push(key, *rank);
        }
        let mut expected: Vec<_> = (0..).zip(ranks).collect();
        expected.sort_by_key(|(_, rank)| *rank);
        prop_assert_eq!(drain(&mut queue), expected);
    }
}

fn drain(queue: &mut Pifo) -> Vec<(u32, u64)> {
    std::iter::from_fn(|| queue.pop()).collect()
}

#[test]
fn a_key_pushed_again_moves_behind_its_equals() {
    let mut queue = Pifo::new();
    for key in [7, 3, 5, 7] {
        queue.push(key, 1);
    }
    assert_eq!(drain(&mut queue), [(3, 1), (5, 1), (7, 1)]);
}

#[test]
fn the_extreme_ranks_are_ranks_like_others() {
    let mut queue = Pifo::new();
    for key in 0..2_000 {
        queue.push(key, [u64::MAX, 0, u64::MAX - 1][key as usize % 3]);
    }
    assert!(drain(&mut queue).is_sorted_by_key(|(key, rank)| (*rank, *key)));
}

#[test]
fn order_outlives_the_numbers_of_pushes() {
    let mut queue = Pifo::new();
    queue.pushes = OUT - 1_000;
    let ranks: Vec<_> = (0..2_000u32).map(|key| u64::from(key.wrapping_mul(2_654_435_761) % 50) << 30).collect();
    for (key, rank) in (0..).zip(&ranks) {
        queue.push(key, *rank);
    }
    assert!(queue.pushes < OUT / 2, "they were renumbered");
    let mut expected: Vec<_> = (0..).zip(ranks).collect();
    expected.sort_by_key(|(_, rank)| *rank);
    assert_eq!(drain(&mut queue), expected);
}

/// Total bytes that a queue holds.
fn bytes(queue: &Pifo) -> usize {
    queue.pushed.capacity() * size_of::<u32>() + queue.near.bytes() + queue.far.bytes()
}

#[test]
fn memory_follows_what_is_queued() {
    let mut queue = Pifo::new();
    assert_eq!(bytes(&queue), 0, "nothing");
    for key in 0..10 {
        queue.push(key, u64::from(key));
    }
    assert!(bytes(&queue) < 512, "ten streams: {}", bytes(&queue));
    let mut random = Random(2);
    for key in 0..100_000 {
        queue.push(key, random.below(1 << 30));
    }
    let full = bytes(&queue);
    assert!(full < 100_000 * 64, "a hundred thousand: {full}");
    for _ in 0..2_000_000 {
        queue.push(random.below(100_000) as u32, random.below(1 << 30));
    }
    assert!(bytes(&queue) < 2 * full, "as many, pushed again and again: {} after {full}", bytes(&queue));
    for key in 0..100_000 {
        queue.remove(key);
    }
    assert_eq!(bytes(&queue), 0, "nothing again");
}

#[test]
fn removed_keys_do_not_pile_up_behind_one_that_stays() {
    let mut queue = Pifo::new();
    queue.push(0, 0);
    for turn in 0..1_000_000 {
        queue.push(1, turn);
        queue.remove(1);
    }
    assert!(bytes(&queue) < 200_000, "{}", bytes(&queue));
}
