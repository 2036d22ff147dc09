//! The lines of clients that want to be newcomers at a listener, one of each address, and which client is sent away if too many wait.
//!
//! The client that is sent away is of the network with the most waiting clients: the newest in the longest line there. If several networks
//! have as many, clients of silent networks go first, then the newest. A network is silent if its last newcomer left, or was evicted,
//! before it had shown what the listener asks for; a newcomer that was never read does not count. So the clients of a flood keep others out
//! only once, however many networks they come from, up to as many as are remembered.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    net::IpAddr,
};

use admission::strangers::{AddressPrefix, RememberedPrefixes};
use tokio::sync::oneshot;

use crate::unidentified_callers;

/// The maximum number of clients of a listener that wait without a place among its connections; each takes a descriptor.
pub(crate) const MOST_WAITING: usize = 1_024;

/// The number of a client that was let in, and a receiver that closes once it has to leave.
pub(super) type LetIn = (u64, oneshot::Receiver<Infallible>);

/// The clients that wait.
#[derive(Default)]
pub(super) struct Lines {
    /// In the order in which they came.
    of: BTreeMap<IpAddr, VecDeque<Waiting>>,
    /// How many clients have waited so far.
    came: u64,
    /// The networks whose last newcomer has shown nothing.
    silent: RememberedPrefixes,
}

/// A client that waits.
pub(super) struct Waiting {
    /// Whether its network was silent.
    is_silent: bool,
    /// How many clients had waited before.
    came: u64,
    /// Whether it keeps its place among the listener's connections, so that the maximum of these bounds its line.
    keeps_place: bool,
    pub(super) enters: oneshot::Sender<LetIn>,
}

impl Waiting {
    /// Returns the place of the client among those that come first of their lines: the least one is next.
    pub(super) const fn rank(&self) -> (bool, u64) {
        (self.is_silent, self.came)
    }
}

/// Whether the clients of a line keep their places while they wait. All clients of one address are alike.
pub(super) fn keep_places(line: &VecDeque<Waiting>) -> bool {
    line.front().is_some_and(|first| first.keeps_place)
}

impl Lines {
    /// Adds a client to the line of its address.
    pub(super) fn push(&mut self, from: IpAddr, keeps_place: bool, enters: oneshot::Sender<LetIn>) {
        self.came += 1;
        let is_silent = self.silent.contains(AddressPrefix::of(from));
        let waiting = Waiting { is_silent, came: self.came, keeps_place, enters };
        self.of.entry(unidentified_callers::place(from)).or_default().push_back(waiting);
    }

    /// Takes the first client out of the line of an address.
    pub(super) fn pop(&mut self, place: IpAddr) -> Option<Waiting> {
        let line = self.of.get_mut(&place)?;
        let first = line.pop_front();
        if line.is_empty() {
            self.of.remove(&place);
        }
        first
    }

    /// Returns the lines, none of which is empty, by their addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&IpAddr, &VecDeque<Waiting>)> {
        self.of.iter()
    }

    /// Sends clients away while more than [`MOST_WAITING`] wait without a place.
    pub(super) fn shorten(&mut self) {
        loop {
            let waiting: Vec<_> = self.of.iter().filter(|(_, line)| !keep_places(line)).collect();
            if waiting.iter().map(|(_, line)| line.len()).sum::<usize>() <= MOST_WAITING {
                return;
            }
            // In the order of addresses, the lines of a network are neighbours.
            let networks =
                waiting.chunk_by(|(one, _), (next, _)| AddressPrefix::of(**one) == AddressPrefix::of(**next));
            let leaving = networks.filter_map(|lines| {
                let newest = lines.iter().filter_map(|(place, line)| Some((line.len(), line.back()?.rank(), **place)));
                let (_, newest, place) = newest.max()?;
                Some((lines.iter().map(|(_, line)| line.len()).sum::<usize>(), newest, place))
            });
            let Some((.., place)) = leaving.max() else { return };
            if let Some(line) = self.of.get_mut(&place) {
                line.pop_back();
                if line.is_empty() {
                    self.of.remove(&place);
                }
            }
        }
    }

    /// Notes that a newcomer of this network left, or was evicted, before it had shown what the listener asks for.
    pub(super) fn showed_nothing(&mut self, network: AddressPrefix) {
        self.silent.insert(network);
    }

    /// Notes that a newcomer of this network has shown what the listener asks for.
    pub(super) fn has_shown(&mut self, network: AddressPrefix) {
        self.silent.remove(network);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, Ipv6Addr},
        sync::Arc,
        time::Duration,
    };

    use admission::strangers::REMEMBERED;
    use tokio::{sync::Semaphore, time::sleep};

    use super::{
        super::{GRACE, Newcomers, tests::newcomers},
        *,
    };
    use crate::holder::Holder;

    /// How many of this number of honest clients, which come one after the other, are served.
    async fn served(newcomers: &Arc<Newcomers>, from: IpAddr, clients: usize) -> usize {
        let mut served = 0;
        for _ in 0..clients {
            if let Some((newcomer, ..)) = newcomers.enter(from, None, false).await {
                newcomer.may_stay_as(|| Some(Holder::Unknown));
                served += 1;
            }
            sleep(Duration::from_millis(100)).await;
        }
        served
    }

    /// Connects from each address, stays silent, and connects again a little after it was sent away.
    fn flood(newcomers: &Arc<Newcomers>, addresses: impl Iterator<Item = IpAddr>) {
        for from in addresses {
            let newcomers = newcomers.clone();
            tokio::spawn(async move {
                loop {
                    if let Some((_newcomer, mut eviction, _)) = newcomers.enter(from, None, false).await {
                        eviction.comes().await;
                    }
                    sleep(Duration::from_secs(1)).await;
                }
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_of_many_addresses_whose_clients_wait_keeps_those_of_others_in_line() {
        let newcomers = newcomers(1_024, 64);
        let of = |subnet| Ipv6Addr::new(0xfd12, 0x3456, 0x789a, subnet, 0, 0, 0, 1).into();
        flood(&newcomers, (0..1_400).map(of));
        sleep(Duration::from_secs(1)).await;
        assert_eq!(served(&newcomers, Ipv4Addr::new(192, 0, 2, 1).into(), 3).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_clients_of_many_networks_keep_no_other_out_once_each_had_its_time() {
        let newcomers = newcomers(1_024, 64);
        let of = |number: u16| Ipv4Addr::new(10, number.to_be_bytes()[0], number.to_be_bytes()[1], 1).into();
        flood(&newcomers, (0..1_400).map(of));
        sleep(Duration::from_secs(15)).await;
        assert_eq!(served(&newcomers, Ipv4Addr::new(192, 0, 2, 1).into(), 10).await, 10);
    }

    #[tokio::test(start_paused = true)]
    async fn the_network_of_a_client_that_was_never_read_is_not_silent() {
        for is_evicted in [false, true] {
            let (newcomers, places) = (newcomers(2, 2), Arc::new(Semaphore::new(1)));
            let first = newcomers.enter(Ipv4Addr::new(192, 0, 2, 1).into(), None, false).await;
            let (from, place) = (Ipv4Addr::new(198, 51, 100, 1).into(), places.clone().acquire_owned().await.ok());
            let second = {
                let newcomers = newcomers.clone();
                tokio::spawn(async move { newcomers.enter(from, place, false).await.is_some() })
            };
            let _other = places.acquire().await.unwrap();
            drop(first);
            sleep(2 * GRACE).await;
            assert!(!second.is_finished(), "it waits for its place");
            if is_evicted {
                assert!(newcomers.enter(Ipv4Addr::LOCALHOST.into(), None, true).await.is_some());
                assert!(!second.await.unwrap());
            } else {
                second.abort();
                assert!(second.await.unwrap_err().is_cancelled());
            }
            let now = newcomers.now.lock();
            let is_silent = |of: IpAddr| now.as_ref().unwrap().lines.silent.contains(AddressPrefix::of(of));
            assert_eq!([from, Ipv4Addr::new(192, 0, 2, 1).into()].map(is_silent), [false, true]);
        }
    }

    #[test]
    fn a_network_is_silent_until_one_of_its_clients_shows_something_and_few_are_remembered() {
        let mut lines = Lines::default();
        let network = |number: u32| AddressPrefix::of(Ipv4Addr::from(number << 8).into());
        for number in 0..=REMEMBERED as u32 {
            lines.showed_nothing(network(number));
        }
        lines.has_shown(network(2));
        let is_silent = |number| lines.silent.contains(network(number));
        assert_eq!([0, 1, 2, 3].map(is_silent), [false, true, false, true]);
    }

    #[test]
    fn a_network_that_was_silent_has_shown_something_and_is_silent_again_is_remembered_as_the_newest() {
        let mut lines = Lines::default();
        let network = |number: u32| AddressPrefix::of(Ipv4Addr::from(number << 8).into());
        for number in 0..REMEMBERED as u32 {
            lines.showed_nothing(network(number));
        }
        lines.has_shown(network(0));
        lines.showed_nothing(network(0));
        lines.showed_nothing(network(REMEMBERED as u32));
        let is_silent = |number| lines.silent.contains(network(number));
        assert_eq!([0, 1, 2].map(is_silent), [true, false, true]);
    }
}
