//! Identifiers. Each kind is a type of its own: crossed ids destroy the wrong machine.

use std::{cmp::Ordering, fmt, hash, marker::PhantomData, str::FromStr};

use compact_str::CompactString;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use uuid::Uuid;

/// A UUID that says what it identifies.
pub struct Id<K> {
    uuid: Uuid,
    kind: PhantomData<fn() -> K>,
}

/// Marks ids of instances.
#[derive(Debug)]
pub enum InstanceKind {}
/// Marks ids of assignments.
#[derive(Debug)]
pub enum AssignmentKind {}
/// Marks ids of jobs of the built-in queue.
#[derive(Debug)]
pub enum JobKind {}

/// One machine: one create call with one set of arguments (link 1).
pub type InstanceId = Id<InstanceKind>;
/// One job's claim on some GPUs of one instance.
pub type AssignmentId = Id<AssignmentKind>;
/// A job of the built-in queue; made by the client, so that a lost reply does not submit twice.
pub type JobId = Id<JobKind>;

impl<K> Id<K> {
    /// Takes a UUID as the id.
    #[must_use]
    pub const fn from_uuid(uuid: Uuid) -> Self {
        Self { uuid, kind: PhantomData }
    }

    /// The UUID itself.
    #[must_use]
    pub const fn uuid(self) -> Uuid {
        self.uuid
    }
}

impl JobId {
    /// A new id, made by the client that submits.
    #[must_use]
    pub fn random() -> Self {
        Self::from_uuid(Uuid::now_v7())
    }
}

impl<K> Clone for Id<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K> Copy for Id<K> {}
impl<K> PartialEq for Id<K> {
    fn eq(&self, other: &Self) -> bool {
        self.uuid == other.uuid
    }
}
impl<K> Eq for Id<K> {}
impl<K> PartialOrd for Id<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<K> Ord for Id<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.uuid.cmp(&other.uuid)
    }
}
impl<K> hash::Hash for Id<K> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.uuid.hash(state);
    }
}
impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl<K> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.uuid, f)
    }
}
impl<K> FromStr for Id<K> {
    type Err = uuid::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self::from_uuid)
    }
}
impl<K> Serialize for Id<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.uuid.serialize(serializer)
    }
}
impl<'de, K> Deserialize<'de> for Id<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Uuid::deserialize(deserializer).map(Self::from_uuid)
    }
}

/// A name that an admin wrote in the config: a letter or digit, then up to 62 of letters, digits, `.`, `_`, `-`.
pub struct Name<K> {
    /// Inline up to 24 bytes: the planner compares names by the ten thousand.
    text: CompactString,
    kind: PhantomData<fn() -> K>,
}

/// Marks names of pools.
#[derive(Debug)]
pub enum PoolKind {}
/// Marks names of placements.
#[derive(Debug)]
pub enum PlacementKind {}
/// Marks names of labels.
#[derive(Debug)]
pub enum LabelKind {}
/// Marks names of forges.
#[derive(Debug)]
pub enum ForgeKind {}

/// The name of a pool: interchangeable machines with bounds and timeouts.
pub type PoolName = Name<PoolKind>;
/// The name of a placement: one rung of a pool's ladder.
pub type PlacementName = Name<PlacementKind>;
/// What a job asks for.
pub type LabelName = Name<LabelKind>;
/// The name of a forge, `direct` for the built-in queue.
pub type ForgeName = Name<ForgeKind>;

/// Why a text is no name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a name: use 1 to 63 of A-Z a-z 0-9 . _ - and begin with a letter or digit")]
pub struct BadName {
    /// The text as given.
    pub text: String,
}

impl<K> Name<K> {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Stands for a name that was lost.
    #[must_use]
    pub fn unknown() -> Self {
        Self { text: CompactString::const_new("unknown"), kind: PhantomData }
    }
}

impl ForgeName {
    /// The built-in queue.
    #[must_use]
    pub fn direct() -> Self {
        Self { text: CompactString::const_new("direct"), kind: PhantomData }
    }
}

impl<K> FromStr for Name<K> {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let good = (1..=63).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if good { Ok(Self { text: text.into(), kind: PhantomData }) } else { Err(BadName { text: text.to_owned() }) }
    }
}
impl<K> Clone for Name<K> {
    fn clone(&self) -> Self {
        Self { text: self.text.clone(), kind: PhantomData }
    }
}
impl<K> PartialEq for Name<K> {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}
impl<K> Eq for Name<K> {}
impl<K> PartialOrd for Name<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<K> Ord for Name<K> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}
impl<K> hash::Hash for Name<K> {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}
impl<K> fmt::Debug for Name<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}
impl<K> fmt::Display for Name<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}
impl<K> Serialize for Name<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}
impl<'de, K> Deserialize<'de> for Name<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A GPU's UUID as the driver writes it (`GPU-…`). Indices are never used: CDI, NVML and CUDA count differently.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuId(pub String);

impl fmt::Display for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_refuse_what_would_break_a_path_or_a_table() {
        for good in ["gpu-h200", "x", "A.b_c-9", &"a".repeat(63)] {
            assert_eq!(good.parse::<LabelName>().unwrap().as_str(), good);
        }
        for bad in ["", "-x", ".", "a b", "a/b", "ä", "a\n", &"a".repeat(64)] {
            assert!(bad.parse::<LabelName>().is_err(), "{bad:?}");
        }
    }
}
