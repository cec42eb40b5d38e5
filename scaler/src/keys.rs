//! The scaler's secrets without a database (link 1): everything an agent proves is computed from one key file.
//!
//! HKDF-SHA256 derives one working key per label from the file's 32 bytes, so that no two uses share a key. The file
//! is made only where no database exists: a database whose key is lost holds machines whose agents could never be
//! recognised again, and somebody must decide about them.

use std::{
    fmt, fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use aws_lc_rs::{
    aead::{self, Aad, NONCE_LEN, Nonce, RandomizedNonceKey},
    constant_time,
    error::Unspecified,
    hkdf, hmac, rand,
};
use pilotlight_runtime::durable;
use pilotlight_wire::{InstanceId, Secret};

/// Length of the key file, bytes.
const KEY_LEN: usize = 32;

/// An admin token shorter than this is not worth the name.
const MIN_TOKEN_LEN: usize = 32;

/// Why the key file or the admin token cannot be used. All of them are config errors (exit code 78).
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The database is there, its key is not.
    #[error(
        "the database has no key: {} is missing; put the key file back from a backup, or move the database away to start anew",
        .0.display()
    )]
    Missing(PathBuf),
    /// Others may read the file.
    #[error("{} has mode {mode:04o} and others could read it; run: chmod 600 {}", .path.display(), .path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file's content cannot be right.
    #[error("{} is not usable: {problem}", .path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The file system refused.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// `read` or `create`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The cryptographic library refused, such as for want of randomness.
    #[error("the cryptographic library failed")]
    Crypto(#[from] Unspecified),
}

/// A sealed payload that cannot be opened: another key, another row, or altered bytes.
#[derive(Debug, thiserror::Error)]
#[error("a sealed payload cannot be opened: it was altered, moved to another row, or sealed with another key")]
pub struct OpenError;

/// The working keys.
pub struct Keys {
    enrol: hmac::Key,
    agent: hmac::Key,
    seal: RandomizedNonceKey,
    controller: String,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("controller", &self.controller).finish_non_exhaustive()
    }
}

impl Keys {
    /// Reads the key file; makes it (durably, mode 0600) when it is missing and no database exists.
    ///
    /// # Errors
    /// A database without its key, a file of the wrong length, a mode wider than 0600, and failures to read or write.
    pub fn load_or_create(path: &Path, database_exists: bool) -> Result<Self, KeyError> {
        if let Some(bytes) = read_private(path)? {
            let key: [u8; KEY_LEN] = bytes.as_slice().try_into().map_err(|_| KeyError::Content {
                path: path.to_owned(),
                problem: format!(
                    "it holds {} bytes instead of {KEY_LEN}; put the right key file back from a backup",
                    bytes.len()
                ),
            })?;
            return Self::derive(&key);
        }
        if database_exists {
            return Err(KeyError::Missing(path.to_owned()));
        }
        let key = random()?;
        create_private(path, &key)?;
        Self::derive(&key)
    }

    fn derive(key: &[u8; KEY_LEN]) -> Result<Self, KeyError> {
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(key);
        let derived = |label: &str| -> Result<[u8; 32], Unspecified> {
            let mut bytes = [0; 32];
            root.expand(&[label.as_bytes()], hkdf::HKDF_SHA256)?.fill(&mut bytes)?;
            Ok(bytes)
        };
        let controller = derived("controller")?;
        Ok(Self {
            enrol: hmac::Key::new(hmac::HMAC_SHA256, &derived("enrol")?),
            agent: hmac::Key::new(hmac::HMAC_SHA256, &derived("agent")?),
            seal: RandomizedNonceKey::new(&aead::AES_256_GCM, &derived("seal")?)?,
            controller: hex::encode(controller.get(..8).unwrap_or(&controller)),
        })
    }

    /// The id in provider tags that tells this scaler's machines from another's.
    #[must_use]
    pub fn controller_id(&self) -> &str {
        &self.controller
    }

    /// The enrolment secret of an instance; the same at every call, so that user-data can be rebuilt after a crash.
    #[must_use]
    pub fn enrol_secret(&self, instance: InstanceId) -> Secret {
        Secret::new(hex::encode(hmac::sign(&self.enrol, instance.uuid().as_bytes())))
    }

    /// Whether a secret is the enrolment secret of an instance; in constant time.
    #[must_use]
    pub fn verify_enrol(&self, instance: InstanceId, secret: &Secret) -> bool {
        // Exposed to be compared.
        let Ok(tag) = hex::decode(secret.expose()) else { return false };
        hmac::verify(&self.enrol, instance.uuid().as_bytes(), &tag).is_ok()
    }

    /// The bearer token of an agent: `instance.nonce.HMAC(agent, instance ‖ nonce)`.
    #[must_use]
    pub fn bearer(&self, instance: InstanceId, nonce: &str) -> Secret {
        let tag = hmac::sign(&self.agent, &agent_message(instance, nonce));
        Secret::new(format!("{instance}.{nonce}.{}", hex::encode(tag)))
    }

    /// Whose bearer token this is: the instance and the nonce it was made for. The caller still asks whether that
    /// nonce is the recorded one and the instance's phase allows it.
    #[must_use]
    pub fn verify_bearer(&self, token: &str) -> Option<(InstanceId, String)> {
        let (instance, rest) = token.split_once('.')?;
        let (nonce, tag) = rest.rsplit_once('.')?;
        let instance: InstanceId = instance.parse().ok()?;
        let tag = hex::decode(tag).ok()?;
        hmac::verify(&self.agent, &agent_message(instance, nonce), &tag).ok()?;
        Some((instance, nonce.to_owned()))
    }

    /// Seals a payload for one row: a random 96-bit nonce, then AES-256-GCM with the row's id as associated data.
    ///
    /// # Errors
    /// When the library has no randomness, or for payloads beyond the cipher's 64 GiB.
    pub fn seal(&self, row_id: &[u8], plain: &[u8]) -> Result<Vec<u8>, KeyError> {
        let mut sealed = plain.to_vec();
        let nonce = self.seal.seal_in_place_append_tag(Aad::from(row_id), &mut sealed)?;
        sealed.splice(..0, *nonce.as_ref());
        Ok(sealed)
    }

    /// Opens what [`Keys::seal`] made for the same row.
    ///
    /// # Errors
    /// When it was altered, belongs to another row, or was sealed with another key.
    pub fn open(&self, row_id: &[u8], sealed: &[u8]) -> Result<Vec<u8>, OpenError> {
        let (nonce, cipher) = sealed.split_at_checked(NONCE_LEN).ok_or(OpenError)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| OpenError)?;
        let mut plain = cipher.to_vec();
        let len = self.seal.open_in_place(nonce, Aad::from(row_id), &mut plain).map_err(|_| OpenError)?.len();
        plain.truncate(len);
        Ok(plain)
    }
}

fn agent_message(instance: InstanceId, nonce: &str) -> Vec<u8> {
    [instance.uuid().as_bytes(), nonce.as_bytes()].concat()
}

/// The one token of the client API. Local clients read it from its file.
pub struct AdminToken(Secret);

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken([redacted])")
    }
}

impl AdminToken {
    /// Reads the token's file; makes it (durably, mode 0600, 32 random bytes in hex) when it is missing.
    ///
    /// # Errors
    /// A token too short to be one, a mode wider than 0600, and failures to read or write.
    pub fn load_or_create(path: &Path) -> Result<Self, KeyError> {
        let Some(bytes) = read_private(path)? else {
            let token = hex::encode(random()?);
            create_private(path, format!("{token}\n").as_bytes())?;
            return Ok(Self(Secret::new(token)));
        };
        let token = String::from_utf8_lossy(&bytes).trim().to_owned();
        if token.len() < MIN_TOKEN_LEN || !token.chars().all(|c| c.is_ascii_graphic()) {
            return Err(KeyError::Content {
                path: path.to_owned(),
                problem: format!(
                    "a token has at least {MIN_TOKEN_LEN} printable characters without spaces; remove the file and the \
                     next start makes a new one"
                ),
            });
        }
        Ok(Self(Secret::new(token)))
    }

    /// Whether a text is the token; in constant time.
    #[must_use]
    pub fn verify(&self, token: &str) -> bool {
        // Exposed to be compared.
        constant_time::verify_slices_are_equal(self.0.expose().as_bytes(), token.as_bytes()).is_ok()
    }
}

fn random() -> Result<[u8; KEY_LEN], Unspecified> {
    let mut bytes = [0; KEY_LEN];
    rand::fill(&mut bytes)?;
    Ok(bytes)
}

/// Reads a file that nobody else may read. `None` when there is none.
fn read_private(path: &Path) -> Result<Option<Vec<u8>>, KeyError> {
    let failed = |source| KeyError::Io { doing: "read", path: path.to_owned(), source };
    let mode = match fs::metadata(path) {
        Ok(metadata) => metadata.permissions().mode() & 0o7777,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if mode & 0o077 != 0 {
        return Err(KeyError::Exposed { path: path.to_owned(), mode });
    }
    fs::read(path).map(Some).map_err(failed)
}

fn create_private(path: &Path, bytes: &[u8]) -> Result<(), KeyError> {
    durable::write(path, bytes).map_err(|source| KeyError::Io { doing: "create", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const NONCE: &str = "abababababababababababababababababababababababababababababababab";

    fn instance() -> InstanceId {
        "0192f0c1-2345-7abc-8def-0123456789ab".parse().unwrap()
    }

    /// Keys of the file `00 01 … 1f`.
    fn known() -> Keys {
        let bytes: Vec<u8> = (0..32).collect();
        Keys::derive(bytes.as_slice().try_into().unwrap()).unwrap()
    }

    // The expected values were computed with Python's hmac and hashlib (RFC 5869 without a salt) and `cryptography`.
    #[test]
    fn known_answers() {
        let keys = known();
        assert_eq!(keys.controller_id(), "a850220ab83b19d3");
        assert_eq!(
            keys.enrol_secret(instance()).expose(),
            "cf1f1a24caf179f409df8191727737a23929684eefe21e18e23c4f365b01e7c7"
        );
        let tag = "a747967bf806360fc6ad02d1c171d8e3f13e0acd0acfe7e48d2ba6b3253012a8";
        assert_eq!(keys.bearer(instance(), NONCE).expose(), format!("{}.{NONCE}.{tag}", instance()));
        let sealed = hex::decode("000102030405060708090a0b09e57ff74822fdeca5ab50138a77b5747434eddafa4b50").unwrap();
        assert_eq!(keys.open(b"row 7", &sealed).unwrap(), b"payload");
    }

    #[test]
    fn enrolment_secrets_are_one_instance_s_own() {
        let keys = known();
        let other: InstanceId = "0192f0c1-2345-7abc-8def-0123456789ac".parse().unwrap();
        assert!(keys.verify_enrol(instance(), &keys.enrol_secret(instance())));
        assert!(!keys.verify_enrol(other, &keys.enrol_secret(instance())));
        for bad in ["", "zz", "cf1f", NONCE] {
            assert!(!keys.verify_enrol(instance(), &Secret::new(bad)), "{bad}");
        }
    }

    #[test]
    fn a_bearer_altered_anywhere_is_nobody_s() {
        let keys = known();
        let token = keys.bearer(instance(), NONCE);
        assert_eq!(keys.verify_bearer(token.expose()), Some((instance(), NONCE.to_owned())));
        for at in 0..token.expose().len() {
            let mut bytes = token.expose().as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
            assert_eq!(keys.verify_bearer(std::str::from_utf8(&bytes).unwrap()), None, "byte {at}");
        }
        for bad in ["", ".", "..", "a.b.c", &token.expose()[..token.expose().len() - 2], "0192f0c1.x"] {
            assert_eq!(keys.verify_bearer(bad), None, "{bad}");
        }
        let enrol = keys.enrol_secret(instance());
        assert_eq!(keys.verify_bearer(&format!("{}.{NONCE}.{}", instance(), enrol.expose())), None);
    }

    #[test]
    fn sealed_payloads_open_only_whole_in_their_row() {
        let keys = known();
        let sealed = keys.seal(b"row", b"secret").unwrap();
        assert!(!sealed.windows(6).any(|window| window == b"secret"));
        assert_eq!(keys.open(b"row", &sealed).unwrap(), b"secret");
        assert!(keys.open(b"another", &sealed).is_err());
        for at in 0..sealed.len() {
            let mut altered = sealed.clone();
            altered[at] ^= 1;
            assert!(keys.open(b"row", &altered).is_err(), "byte {at}");
            assert!(keys.open(b"row", &sealed[..at]).is_err(), "cut at {at}");
        }
        let nonces: HashSet<_> = (0..5000).map(|_| keys.seal(b"row", b"").unwrap()[..NONCE_LEN].to_vec()).collect();
        assert_eq!(nonces.len(), 5000, "a nonce was used twice");
    }

    #[test]
    fn the_key_is_made_once_and_only_without_a_database() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let error = Keys::load_or_create(&path, true).unwrap_err();
        assert!(matches!(error, KeyError::Missing(_)), "{error}");
        assert!(!path.exists(), "a key was made beside a database");

        let made = Keys::load_or_create(&path, false).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for database_exists in [true, false] {
            let again = Keys::load_or_create(&path, database_exists).unwrap();
            assert_eq!(again.controller_id(), made.controller_id());
        }
        let other = Keys::load_or_create(&dir.path().join("other"), false).unwrap();
        assert_ne!(other.controller_id(), made.controller_id());
        assert!(!format!("{made:?}").contains(&hex::encode(fs::read(&path).unwrap())));
    }

    #[test]
    fn an_unfit_key_file_is_refused_with_its_fix() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        for len in [0, 31, 33, 64] {
            durable::write(&path, &vec![7; len]).unwrap();
            let error = Keys::load_or_create(&path, false).unwrap_err().to_string();
            assert!(error.contains(&format!("{len} bytes")), "{error}");
        }
        durable::write(&path, &[7; 32]).unwrap();
        for mode in [0o640, 0o604, 0o620, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = Keys::load_or_create(&path, false).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        Keys::load_or_create(&path, true).unwrap();
        let error = Keys::load_or_create(&dir.path().join("no/such/dir"), false).unwrap_err();
        assert!(matches!(error, KeyError::Io { doing: "create", .. }), "{error}");
    }

    #[test]
    fn the_admin_token_stays_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.token");
        AdminToken::load_or_create(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.trim().len(), 64);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let token = AdminToken::load_or_create(&path).unwrap();
        assert!(token.verify(text.trim()));
        for bad in ["", &text[..63], &format!("x{}", &text[1..64]), &text] {
            assert!(!token.verify(bad), "{bad:?}");
        }
        assert!(!format!("{token:?}").contains(text.trim()));

        for bad in ["", "\n", "short", "has a space in it but is long enough to pass"] {
            durable::write(&path, bad.as_bytes()).unwrap();
            assert!(AdminToken::load_or_create(&path).is_err(), "{bad:?}");
        }
    }
}
