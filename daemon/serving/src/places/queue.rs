//! The order of requests that wait for a place.
//!
//! The policy's schedule chooses the next class: the class of the request that is first by its discipline. Within the
//! class, tenants share by start-time fair queueing ([`Discipline::Wfq`]), measured in the tokens that their requests are
//! expected to use. Requests of one tenant and class keep the order of the discipline. Without tenants, only the
//! discipline counts.

use std::{collections::BTreeMap, sync::Arc};

use sched::stream::{Discipline, DisciplineClock, Service, Streams};

use super::Wish;

/// The properties of a request that decide its turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The service that its class gives it.
    pub service: Service,
    /// The name of its class.
    pub class: Arc<str>,
    /// Its tenant, and the tenant's weight beside others of the class; requests without a tenant share as one.
    pub tenant: Option<(Arc<str>, u16)>,
    /// The user among whose waiting requests it counts; `None` if users are not known.
    pub user: Option<Arc<str>>,
    /// How many tokens it is expected to use, prompt and answer.
    pub tokens: u64,
    /// How many of these tokens the answer is expected to have. This has no influence on the request's turn.
    pub answer_tokens: u64,
    /// The engine where it is served best. It has no influence on its turn.
    pub wish: Wish,
}

impl From<Service> for Claim {
    /// Returns the claim of a request without a tenant, of a class without a name.
    fn from(service: Service) -> Self {
        Self { service, ..Self::default() }
    }
}

/// Waiting requests, each with a value.
#[derive(Debug)]
pub(super) struct Queue<T> {
    /// All requests, by their names in this queue.
    all: Ordered,
    slots: Vec<Option<Slot<T>>>,
    classes: BTreeMap<Arc<str>, Shares>,
    /// How many requests of each user wait.
    users: BTreeMap<Arc<str>, usize>,
    /// How many tokens the answers to all requests are expected to have.
    answer_tokens: u64,
}

#[derive(Debug)]
struct Slot<T> {
    value: T,
    user: Option<Arc<str>>,
    class: Arc<str>,
    /// The tenant's flow in its class, and the request's name there.
    flow: usize,
    name: u32,
    tokens: u64,
    answer_tokens: u64,
}

/// The tenants of a class with waiting requests, or with requests since the class last had none waiting.
#[derive(Debug)]
struct Shares {
    /// The flows, by their indices below.
    tenants: Ordered,
    flows: Vec<Flow>,
    /// How many requests wait.
    waiting: usize,
}

/// The requests of one tenant and class.
#[derive(Debug)]
struct Flow {
    tenant: Option<Arc<str>>,
    requests: Ordered,
    /// The slot of each request, by its name in this flow.
    slots: Vec<Option<usize>>,
}

/// Streams with a clock of their own.
#[derive(Debug)]
struct Ordered {
    clock: DisciplineClock,
    streams: Streams,
}

impl Ordered {
    const fn new(discipline: Discipline) -> Self {
        Self { clock: DisciplineClock::new(discipline, 0), streams: Streams::new() }
    }

    fn add(&mut self, name: u32, service: Service) {
        self.streams.insert(name, service);
        self.streams.wake(&mut self.clock, name);
    }

    fn next(&self) -> Option<u32> {
        self.streams.turn().map(|(name, _)| name)
    }

    /// Removes a stream whose turn it was.
    fn serve(&mut self, name: u32) {
        self.streams.end_turn(&mut self.clock, name, 1, false);
        self.streams.remove(name);
    }

    fn reorder(&mut self, discipline: Discipline) {
        self.clock = DisciplineClock::new(discipline, 0);
        self.streams.reorder(&mut self.clock);
    }
}

impl<T> Queue<T> {
    pub(super) const fn new(discipline: Discipline) -> Self {
        Self {
            all: Ordered::new(discipline),
            slots: Vec::new(),
            classes: BTreeMap::new(),
            users: BTreeMap::new(),
            answer_tokens: 0,
        }
    }

    /// Returns how many requests wait.
    pub(super) fn len(&self) -> usize {
        self.all.streams.len()
    }

    /// Returns how many requests of a user wait.
    pub(super) fn of(&self, user: Option<&Arc<str>>) -> usize {
        user.and_then(|user| self.users.get(user)).copied().unwrap_or_default()
    }

    /// Returns how many tokens the answers to waiting requests are expected to have.
    pub(super) const fn answer_tokens(&self) -> u64 {
        self.answer_tokens
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.streams.is_empty()
    }

    /// Orders waiting requests by another discipline from now on.
    pub(super) fn reorder(&mut self, discipline: Discipline) {
        if self.all.clock.discipline() != discipline {
            self.all.reorder(discipline);
            let flows = self.classes.values_mut().flat_map(|shares| &mut shares.flows);
            flows.for_each(|flow| flow.requests.reorder(discipline));
        }
    }

    /// Adds a request; returns its name in this queue.
    pub(super) fn add(&mut self, claim: Claim, value: T) -> u32 {
        let Claim { service, class, tenant, user, tokens, answer_tokens, wish: _ } = claim;
        let slot = free(&mut self.slots);
        let discipline = self.all.clock.discipline();
        let shares = self.classes.entry(class.clone()).or_insert_with(|| Shares {
            tenants: Ordered::new(Discipline::Wfq),
            flows: Vec::new(),
            waiting: 0,
        });
        let flow = shares.flow(tenant, discipline);
        let name = shares.add(flow, slot, service);
        if let Some(user) = &user {
            *self.users.entry(user.clone()).or_default() += 1;
        }
        self.answer_tokens += answer_tokens;
        self.slots[slot] = Some(Slot { value, user, class, flow, name, tokens, answer_tokens });
        self.all.add(slot as u32, service);
        slot as u32
    }

    /// Returns the value of a waiting request.
    pub(super) fn get(&self, name: u32) -> Option<&T> {
        self.slots.get(name as usize)?.as_ref().map(|slot| &slot.value)
    }

    /// Returns the request whose turn it is.
    pub(super) fn next(&self) -> Option<u32> {
        let first = self.all.next()?;
        let class = &self.slots.get(first as usize)?.as_ref()?.class;
        let shares = self.classes.get(class)?;
        let flow = shares.flows.get(shares.tenants.next()? as usize)?;
        let slot = flow.slots.get(flow.requests.next()? as usize).copied().flatten();
        slot.map(|slot| slot as u32)
    }

    /// Removes the request whose turn it is, and charges its tenant.
    pub(super) fn serve(&mut self, name: u32) -> Option<T> {
        let slot = self.slots.get_mut(name as usize)?.take()?;
        self.all.serve(name);
        self.leave(&slot, true);
        Some(slot.value)
    }

    /// Removes a request that no longer waits.
    pub(super) fn remove(&mut self, name: u32) -> Option<T> {
        let slot = self.slots.get_mut(name as usize)?.take()?;
        self.all.streams.remove(name);
        self.leave(&slot, false);
        Some(slot.value)
    }

    /// Removes all requests.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.all.clock.discipline());
    }

    fn leave(&mut self, slot: &Slot<T>, is_served: bool) {
        self.answer_tokens -= slot.answer_tokens;
        if let Some((user, waiting)) = slot.user.as_ref().and_then(|user| Some((user, self.users.get_mut(user)?))) {
            *waiting -= 1;
            if *waiting == 0 {
                self.users.remove(user);
            }
        }
        let Some(shares) = self.classes.get_mut(&slot.class) else { return };
        shares.leave(slot.flow, slot.name, is_served.then_some(slot.tokens));
        // Past waiting gives a tenant no credit once no request of the class waits.
        if shares.waiting == 0 {
            self.classes.remove(&slot.class);
        }
    }
}

impl Shares {
    /// Returns the index of a tenant's flow.
    fn flow(&mut self, tenant: Option<(Arc<str>, u16)>, discipline: Discipline) -> usize {
        let (tenant, weight) = tenant.map_or((None, 1), |(name, weight)| (Some(name), weight));
        if let Some(known) = self.flows.iter().position(|flow| flow.tenant == tenant) {
            return known;
        }
        self.flows.push(Flow { tenant, requests: Ordered::new(discipline), slots: Vec::new() });
        let flow = self.flows.len() - 1;
        self.tenants.streams.insert(flow as u32, Service { weight, ..Service::default() });
        flow
    }

    fn add(&mut self, flow: usize, slot: usize, service: Service) -> u32 {
        let of = &mut self.flows[flow];
        let name = free(&mut of.slots);
        of.slots[name] = Some(slot);
        of.requests.add(name as u32, service);
        self.tenants.streams.wake(&mut self.tenants.clock, flow as u32);
        self.waiting += 1;
        name as u32
    }

    /// Removes a request from its flow, which pays for `tokens` if the request was served.
    fn leave(&mut self, flow: usize, name: u32, tokens: Option<u64>) {
        let Self { tenants, flows, waiting } = self;
        let Some(of) = flows.get_mut(flow) else { return };
        *waiting -= 1;
        of.slots[name as usize] = None;
        match tokens {
            Some(_) => of.requests.serve(name),
            None => _ = of.requests.streams.remove(name),
        }
        let has_more = !of.requests.streams.is_empty();
        match tokens {
            Some(tokens) => tenants.streams.end_turn(&mut tenants.clock, flow as u32, tokens.max(1), has_more),
            None if has_more => {}
            // The flow pays nothing now, but its earlier payments still count.
            None => tenants.streams.end_turn(&mut tenants.clock, flow as u32, 0, false),
        }
        if !has_more {
            of.slots = Vec::new();
        }
    }
}

/// Returns the index of an empty slot, which is made if there is none.
fn free<T>(slots: &mut Vec<Option<T>>) -> usize {
    slots.iter().position(Option::is_none).unwrap_or_else(|| {
        slots.push(None);
        slots.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sched::stream::{Expiry, Level, Low};

    use super::*;

    const EDF: Discipline = Discipline::Edf { expiry: Expiry::Soft };

    fn claim(class: &str, tenant: &str, weight: u16, tokens: u64) -> Claim {
        let user = Some(tenant.into());
        Claim { class: class.into(), tenant: Some((tenant.into(), weight)), user, tokens, ..Claim::default() }
    }

    fn serve<T>(queue: &mut Queue<T>) -> Option<T> {
        let next = queue.next()?;
        queue.serve(next)
    }

    /// Returns how many of the first `count` served requests are `who`'s.
    fn first(queue: &mut Queue<&'static str>, count: usize, who: &str) -> usize {
        (0..count).filter(|_| serve(queue).unwrap() == who).count()
    }

    #[test]
    fn a_greedy_tenant_does_not_starve_another_of_its_class() {
        for discipline in [Discipline::Fcfs, EDF, Discipline::Ml { low: Low::Fcfs }] {
            let mut queue = Queue::new(discipline);
            for _ in 0..100 {
                queue.add(claim("c", "greedy", 1, 200), "greedy");
            }
            assert_eq!(first(&mut queue, 10, "greedy"), 10, "no other tenant waits");
            for _ in 0..5 {
                queue.add(claim("c", "other", 1, 200), "other");
            }
            assert_eq!(first(&mut queue, 10, "other"), 5, "every second turn");
            assert_eq!(first(&mut queue, 85, "greedy"), 85);
            assert!(queue.is_empty() && queue.classes.is_empty());
        }
    }

    #[test]
    fn tenants_share_tokens_by_their_weights() {
        let mut queue = Queue::new(Discipline::Fcfs);
        for _ in 0..100 {
            queue.add(claim("c", "heavy", 3, 100), "heavy");
            queue.add(claim("c", "light", 1, 100), "light");
        }
        assert!((59..=61).contains(&first(&mut queue, 80, "heavy")));
        let mut queue = Queue::new(Discipline::Fcfs);
        for _ in 0..100 {
            queue.add(claim("c", "long", 1, 900), "long");
            queue.add(claim("c", "short", 1, 100), "short");
        }
        assert!((9..=11).contains(&first(&mut queue, 100, "long")), "one of 900 tokens for nine of 100");
    }

    #[test]
    fn the_schedule_decides_between_classes_whoever_asks() {
        let mut queue = Queue::new(Discipline::Ml { low: Low::Fcfs });
        let high = Service { level: Level::High, ..Service::default() };
        for _ in 0..3 {
            queue.add(claim("batch", "ann", 9, 1), "batch");
            queue.add(Claim { service: high, ..claim("urgent", "ann", 1, 1_000) }, "urgent");
        }
        queue.add(Claim { service: high, ..claim("urgent", "bob", 1, 1) }, "urgent");
        assert_eq!(first(&mut queue, 4, "urgent"), 4);
        assert_eq!(first(&mut queue, 3, "batch"), 3);
    }

    #[test]
    fn requests_of_one_tenant_keep_the_order_of_the_discipline() {
        let mut queue = Queue::new(EDF);
        let due = |at: u64| Claim {
            service: Service { deadline_ns: Some(at << 4), ..Service::default() },
            ..claim("c", "ann", 1, 1)
        };
        for at in [3, 1, 2] {
            queue.add(due(at), at);
        }
        assert_eq!([(); 3].map(|()| serve(&mut queue).unwrap()), [1, 2, 3]);
        for at in [3, 1, 2] {
            queue.add(due(at), at);
        }
        queue.reorder(Discipline::Fcfs);
        queue.add(due(0), 0);
        assert_eq!([(); 4].map(|()| serve(&mut queue).unwrap()), [1, 2, 3, 0], "as they waited, then as they come");
    }

    proptest! {
        #[test]
        fn whatever_comes_and_goes_all_are_served_once(
            steps in prop::collection::vec((0..4u8, 0..3usize, 0..3usize, 0..64u32), 0..200),
        ) {
            let mut queue = Queue::new(Discipline::Fcfs);
            let mut waiting = std::collections::BTreeSet::new();
            for (at, (step, class, tenant, name)) in steps.into_iter().enumerate() {
                match step {
                    0 => prop_assert_eq!(queue.remove(name).is_some(), waiting.remove(&name)),
                    1 => {
                        let next = queue.next();
                        prop_assert_eq!(next.is_some(), !waiting.is_empty());
                        if let Some(next) = next {
                            prop_assert!(queue.serve(next).is_some() && waiting.remove(&next));
                        }
                    }
                    _ => {
                        let claim = claim(["a", "b", "c"][class], ["x", "y", "z"][tenant], 1 + tenant as u16, name.into());
                        let claim = Claim { answer_tokens: name.into(), ..claim };
                        prop_assert!(waiting.insert(queue.add(claim, at)));
                    }
                }
                prop_assert_eq!(queue.len(), waiting.len());
            }
            while serve(&mut queue).is_some() {}
            prop_assert!(queue.is_empty() && queue.classes.is_empty() && queue.users.is_empty());
            prop_assert_eq!(queue.answer_tokens(), 0);
        }
    }
}
