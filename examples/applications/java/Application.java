import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.util.*;
import java.util.regex.Pattern;
import com.google.gson.Gson;

/** The application in Java, with JDBC. README.md describes its commands. */
public class Application {
	/**
	 * The same request can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown
	 * and failover; IK409, the first request is in progress; IK410, another owner took the lease over, whose result a retry returns.
	 */
	private static final Pattern TRANSIENT = Pattern.compile("(08|40|53|55P03|57P|58|25006|25P03|IK409|IK410).*");
	private static final Gson GSON = new Gson();

	private interface Work<T> {
		T run(Connection connection) throws Exception;
	}

	private record Message(String id, String customer, long amount) {}

	/**
	 * Calls work until it succeeds, with growing pauses, each time on a new connection. Throws what is not transient, and after
	 * RETRY_SECONDS the last error. The work must begin with a claim of the same key: an attempt whose answer was lost might have
	 * committed.
	 */
	private static <T> T retrying(Work<T> work) throws Exception {
		double seconds = Double.parseDouble(System.getenv().getOrDefault("RETRY_SECONDS", "30"));
		long end = System.nanoTime() + (long) (seconds * 1e9);
		for (long pause = 50;; pause = Math.min(2 * pause, 2000)) {
			try (Connection connection = DriverManager.getConnection(System.getenv("DATABASE"))) {
				return work.run(connection);
			} catch (SQLException | Provider.Unavailable error) {
				boolean again = !(error instanceof SQLException fault) || TRANSIENT.matcher(fault.getSQLState()).matches();
				if (!again || System.nanoTime() + pause * 1_000_000 > end) throw error;
			}
			Thread.sleep((long) (pause * (0.5 + Math.random() / 2)));
		}
	}

	/** Runs work in a transaction. */
	private static <T> T transaction(Connection connection, Work<T> work) throws Exception {
		connection.setAutoCommit(false);
		try {
			T result = work.run(connection);
			connection.commit();
			return result;
		} finally {
			// After a commit this does nothing.
			connection.rollback();
			connection.setAutoCommit(true);
		}
	}

	/** Runs a statement and returns its first row, or null if it has none. */
	private static ResultSet row(Connection connection, String sql, Object... arguments) throws SQLException {
		PreparedStatement statement = connection.prepareStatement(sql);
		for (int i = 0; i < arguments.length; i++) statement.setObject(i + 1, arguments[i]);
		if (!statement.execute()) return null;
		ResultSet rows = statement.getResultSet();
		rows.next();
		return rows;
	}

	/** Charges a customer: key, charge and answer commit in one transaction. */
	private static String charge(String key, String customer, long amount) throws Exception {
		return retrying(connection -> transaction(connection, tx -> {
			ResultSet claim = row(tx, "SELECT replayed, response::text FROM idempotency.claim('charge', ?, ?)",
					key, GSON.toJson(Map.of("customer", customer, "amount", amount)));
			if (claim.getBoolean("replayed")) return claim.getString("response");
			long id = row(tx, "INSERT INTO charge (customer, amount) VALUES (?, ?) RETURNING id", customer, amount).getLong("id");
			return row(tx, "SELECT idempotency.complete('charge', ?, ?, 201)::text", key, GSON.toJson(Map.of("charge", id))).getString(1);
		}));
	}

	/** Orders an item, which the provider charges. No transaction is open meanwhile; a lease protects the order. */
	private static String order(String key, String item, long amount) throws Exception {
		String lease = System.getenv().getOrDefault("LEASE", "30 seconds");
		return retrying(connection -> {
			ResultSet claim = row(connection, "SELECT replayed, response::text, token, idempotency.derive_key('order', ?, 'charge')::text AS "
					+ "provider_key, state ->> 'charge' AS charge FROM idempotency.claim('order', ?, ?, lease => ?::interval)",
					key, key, GSON.toJson(Map.of("item", item, "amount", amount)), lease);
			if (claim.getBoolean("replayed")) return claim.getString("response");
			long token = claim.getLong("token");
			// After a takeover, the former owner might have got as far as the checkpoint.
			String charged = claim.getString("charge");
			try {
				if (charged == null) charged = Provider.charge(claim.getString("provider_key"), amount);
			} catch (Provider.Unavailable error) {
				// The checkpoint keeps the request: the provider might have charged it.
				row(connection, "SELECT idempotency.checkpoint('order', ?, ?, 'asked'), idempotency.release('order', ?, ?)", key, token, key, token);
				throw error;
			}
			if (charged == null)
				return row(connection, "SELECT idempotency.fail('order', ?, ?, 402, token => ?)::text",
						key, "{\"error\": \"card_declined\"}", token).getString(1);
			String provider = charged;
			row(connection, "SELECT idempotency.checkpoint('order', ?, ?, 'charged', ?)", key, token, GSON.toJson(Map.of("charge", provider)));
			return transaction(connection, tx -> {
				// Refuses a former owner before it writes, and holds off a takeover until the commit.
				row(tx, "SELECT idempotency.renew('order', ?, ?, ?::interval)", key, token, lease);
				long id = row(tx, "INSERT INTO purchase (item, amount, provider_charge) VALUES (?, ?, ?) RETURNING id",
						item, amount, provider).getLong("id");
				return row(tx, "SELECT idempotency.complete('order', ?, ?, 201, token => ?)::text",
						key, GSON.toJson(Map.of("order", id)), token).getString(1);
			});
		});
	}

	/** Handles a batch of messages that a queue delivers at least once: each has its effect once. */
	private static String consume(List<Message> messages) throws Exception {
		retrying(connection -> transaction(connection, tx -> {
			Set<String> fresh = new HashSet<>();
			try (PreparedStatement statement = tx.prepareStatement("SELECT * FROM idempotency.once_many('consumer', ?, '30 days')")) {
				statement.setArray(1, tx.createArrayOf("text", messages.stream().map(Message::id).toArray()));
				for (ResultSet rows = statement.executeQuery(); rows.next();) fresh.add(rows.getString(1));
			}
			for (Message message : messages)
				if (fresh.remove(message.id()))
					row(tx, "INSERT INTO charge (customer, amount) VALUES (?, ?)", message.customer(), message.amount());
			return null;
		}));
		// Acknowledge after the commit: a batch that is lost before is delivered again.
		return GSON.toJson(Map.of("acknowledged", messages.size()));
	}

	public static void main(String[] arguments) throws Exception {
		try {
			List<Message> messages = new ArrayList<>();
			if (arguments[0].equals("consume"))
				new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)).lines()
						.forEach(line -> messages.add(GSON.fromJson(line, Message.class)));
			System.out.println(switch (arguments[0]) {
				case "charge" -> charge(arguments[1], arguments[2], Long.parseLong(arguments[3]));
				case "order" -> order(arguments[1], arguments[2], Long.parseLong(arguments[3]));
				default -> consume(messages);
			});
		} catch (SQLException error) {
			System.err.println(error.getSQLState() + ": " + error.getMessage());
			System.exit(1);
		}
	}
}
