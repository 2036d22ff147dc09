//! The order of requests that wait for a place.
//!
//! The policy's schedule chooses the next class: the class of the request that is first by its discipline, or the class itself where the
//! discipline gives shares. Classes share, and tenants within a class, by start-time fair queueing ([`Discipline::Wfq`]), measured in the
//! tokens that their requests are expected to use. [`Discipline::Lottery`] gives shares of turns: it draws the class of each turn. Requests
//! of one tenant and class keep the order of the discipline; under the lottery, that of their arrival. Without tenants, only the discipline
//! counts.

use std::{collections::BTreeMap, sync::Arc};

use sched::stream::{Discipline, DisciplineClock, Service, Streams};
use slab::Slab;

use super::claim::Claim;

/// Waiting requests, each with a value.
#[derive(Debug)]
pub(super) struct Queue<T> {
    /// The entries of the schedule, by their names ([`Entry`]).
    all: Ordered,
    slots: Slab<Slot<T>>,
    /// How many requests have come.
    arrivals: u64,
    /// The classes that the schedule orders, each with its number of waiting requests. A class keeps its charges when none waits.
    shared: Vec<(Arc<str>, usize)>,
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
    service: Service,
    /// Its class's index in [`Queue::shared`], if the schedule orders the class and not the request.
    shared: Option<usize>,
    arrival: u64,
    tokens: u64,
    answer_tokens: u64,
}

/// An entry of the schedule: a request, or its class if the discipline gives shares ([`gives_shares`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// The request in this slot.
    Request(usize),
    /// The class with this index in [`Queue::shared`].
    Class(usize),
}

impl Entry {
    /// Returns its name among the streams of the schedule.
    const fn name(self) -> u32 {
        match self {
            Self::Request(slot) => 2 * slot as u32,
            Self::Class(at) => 2 * at as u32 + 1,
        }
    }

    const fn of(name: u32) -> Self {
        let at = name as usize / 2;
        if name.is_multiple_of(2) { Self::Request(at) } else { Self::Class(at) }
    }
}

/// Whether the schedule orders the class of a request and not the request, because the discipline gives classes shares. If it drew for each
/// request, a class would get turns by the number of its waiting requests.
fn gives_shares(discipline: Discipline, service: &Service) -> bool {
    discipline == Discipline::Lottery || discipline.is_by_share(service)
}

/// Returns the order of requests of one tenant and class. The lottery has drawn their class, so it need not draw once more.
fn within_a_class(discipline: Discipline) -> Discipline {
    if discipline == Discipline::Lottery { Discipline::Fcfs } else { discipline }
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
    slots: Slab<usize>,
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
        self.streams.insert(&mut self.clock, name, service);
        self.streams.wake(&mut self.clock, name);
    }

    fn next(&self) -> Option<u32> {
        self.streams.turn().map(|(name, _)| name)
    }

    fn remove(&mut self, name: u32) {
        self.streams.remove(&mut self.clock, name);
    }

    /// Removes a stream whose turn it was.
    fn serve(&mut self, name: u32) {
        self.streams.end_turn(&mut self.clock, name, 1, false);
        self.remove(name);
    }

    /// Charges a flow for `tokens`, or nothing if a request of it left unserved. The flow waits for as long as it `has_more`.
    fn charge(&mut self, flow: u32, tokens: Option<u64>, has_more: bool) {
        match tokens {
            Some(tokens) => self.streams.end_turn(&mut self.clock, flow, tokens.max(1), has_more),
            None if has_more => {}
            None => self.streams.sleep(&mut self.clock, flow),
        }
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
            slots: Slab::new(),
            arrivals: 0,
            shared: Vec::new(),
            classes: BTreeMap::new(),
            users: BTreeMap::new(),
            answer_tokens: 0,
        }
    }

    /// Returns how many requests wait.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
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
        self.slots.is_empty()
    }

    /// Orders waiting requests by another discipline from now on.
    pub(super) fn reorder(&mut self, discipline: Discipline) {
        if self.all.clock.discipline() == discipline {
            return;
        }
        let mut as_they_waited = Vec::new();
        while let Some(name) = self.all.next() {
            self.all.remove(name);
            if let Entry::Request(slot) = Entry::of(name) {
                as_they_waited.push(slot);
            }
        }
        // Where classes share, all other requests come before them; the requests of classes have no order beyond their arrival.
        let of_classes = self.slots.iter().filter(|(_, slot)| slot.shared.is_some());
        let mut of_classes: Vec<_> = of_classes.map(|(place, slot)| (slot.arrival, place)).collect();
        of_classes.sort_unstable();
        as_they_waited.extend(of_classes.into_iter().map(|(_, place)| place));
        (self.all, self.shared) = (Ordered::new(discipline), Vec::new());
        as_they_waited.into_iter().for_each(|slot| self.enter(slot));
        let flows = self.classes.values_mut().flat_map(|shares| &mut shares.flows);
        flows.for_each(|flow| flow.requests.reorder(within_a_class(discipline)));
    }

    /// Makes the request in a slot wait for its turn by the schedule.
    fn enter(&mut self, at: usize) {
        let Some(slot) = self.slots.get_mut(at) else { return };
        if !gives_shares(self.all.clock.discipline(), &slot.service) {
            slot.shared = None;
            return self.all.add(Entry::Request(at).name(), slot.service);
        }
        let known = self.shared.iter().position(|(class, _)| *class == slot.class);
        let of_class = known.unwrap_or(self.shared.len());
        let (flow, service) = (Entry::Class(of_class).name(), Service { deadline_ns: None, ..slot.service });
        slot.shared = Some(of_class);
        match self.shared.get_mut(of_class) {
            Some((_, waiting)) => {
                *waiting += 1;
                self.all.streams.set(&mut self.all.clock, flow, service);
            }
            None => {
                self.shared.push((slot.class.clone(), 1));
                self.all.streams.insert(&mut self.all.clock, flow, service);
            }
        }
        self.all.streams.wake(&mut self.all.clock, flow);
    }

    /// Adds a request; returns its name in this queue.
    pub(super) fn add(&mut self, claim: Claim, value: T) -> u32 {
        let Claim { service, class, tenant, user, tokens, answer_tokens, has_waited: _, wish: _ } = claim;
        let slot = self.slots.vacant_entry();
        let at = slot.key();
        let discipline = self.all.clock.discipline();
        let shares = self.classes.entry(class.clone()).or_insert_with(|| Shares {
            tenants: Ordered::new(Discipline::Wfq),
            flows: Vec::new(),
            waiting: 0,
        });
        let flow = shares.flow(tenant, discipline);
        let name = shares.add(flow, at, service);
        if let Some(user) = &user {
            *self.users.entry(user.clone()).or_default() += 1;
        }
        self.answer_tokens += answer_tokens;
        self.arrivals += 1;
        let (arrival, shared) = (self.arrivals, None);
        slot.insert(Slot { value, user, class, flow, name, service, shared, arrival, tokens, answer_tokens });
        self.enter(at);
        at as u32
    }

    /// Returns the value of a waiting request.
    pub(super) fn get(&self, name: u32) -> Option<&T> {
        self.slots.get(name as usize).map(|slot| &slot.value)
    }

    /// Returns the request whose turn it is.
    pub(super) fn next(&self) -> Option<u32> {
        let class = match Entry::of(self.all.next()?) {
            Entry::Request(slot) => &self.slots.get(slot)?.class,
            Entry::Class(at) => &self.shared.get(at)?.0,
        };
        let shares = self.classes.get(class)?;
        let flow = shares.flows.get(shares.tenants.next()? as usize)?;
        flow.slots.get(flow.requests.next()? as usize).map(|slot| *slot as u32)
    }

    /// Removes the request whose turn it is, and charges its tenant, and its class if classes share.
    pub(super) fn serve(&mut self, name: u32) -> Option<T> {
        self.leave(name as usize, true)
    }

    /// Removes a request that no longer waits.
    pub(super) fn remove(&mut self, name: u32) -> Option<T> {
        self.leave(name as usize, false)
    }

    /// Removes all requests.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.all.clock.discipline());
    }

    fn leave(&mut self, at: usize, is_served: bool) -> Option<T> {
        let slot = self.slots.try_remove(at)?;
        let tokens = is_served.then_some(slot.tokens);
        let shared = slot.shared.and_then(|at| Some((Entry::Class(at).name(), self.shared.get_mut(at)?)));
        match (shared, Entry::Request(at).name()) {
            (Some((flow, (_, waiting))), _) => {
                *waiting -= 1;
                self.all.charge(flow, tokens, *waiting > 0);
            }
            (None, name) if is_served => self.all.serve(name),
            (None, name) => self.all.remove(name),
        }
        if self.slots.is_empty() {
            // Nothing is left to share.
            let flows = std::mem::take(&mut self.shared).len();
            (0..flows).for_each(|at| self.all.remove(Entry::Class(at).name()));
        }
        self.answer_tokens -= slot.answer_tokens;
        if let Some((user, waiting)) = slot.user.as_ref().and_then(|user| Some((user, self.users.get_mut(user)?))) {
            *waiting -= 1;
            if *waiting == 0 {
                self.users.remove(user);
            }
        }
        if let Some(shares) = self.classes.get_mut(&slot.class) {
            shares.leave(slot.flow, slot.name, tokens);
            // Past waiting gives a tenant no credit once no request of the class waits.
            if shares.waiting == 0 {
                self.classes.remove(&slot.class);
            }
        }
        Some(slot.value)
    }
}

impl Shares {
    /// Returns the index of a tenant's flow.
    fn flow(&mut self, tenant: Option<(Arc<str>, u16)>, discipline: Discipline) -> usize {
        let (tenant, weight) = tenant.map_or((None, 1), |(name, weight)| (Some(name), weight));
        if let Some(known) = self.flows.iter().position(|flow| flow.tenant == tenant) {
            return known;
        }
        self.flows.push(Flow { tenant, requests: Ordered::new(within_a_class(discipline)), slots: Slab::new() });
        let flow = self.flows.len() - 1;
        let Ordered { clock, streams } = &mut self.tenants;
        streams.insert(clock, flow as u32, Service { weight, ..Service::default() });
        flow
    }

    fn add(&mut self, flow: usize, slot: usize, service: Service) -> u32 {
        let of = &mut self.flows[flow];
        let name = of.slots.insert(slot) as u32;
        of.requests.add(name, service);
        self.tenants.streams.wake(&mut self.tenants.clock, flow as u32);
        self.waiting += 1;
        name
    }

    /// Removes a request from its flow, which pays for `tokens` if the request was served.
    fn leave(&mut self, flow: usize, name: u32, tokens: Option<u64>) {
        let Self { tenants, flows, waiting } = self;
        let Some(of) = flows.get_mut(flow) else { return };
        *waiting -= 1;
        of.slots.try_remove(name as usize);
        match tokens {
            Some(_) => of.requests.serve(name),
            None => of.requests.remove(name),
        }
        let has_more = !of.slots.is_empty();
        tenants.charge(flow as u32, tokens, has_more);
        if !has_more {
            of.slots = Slab::new();
        }
    }
}

#[cfg(test)]
mod tests;
