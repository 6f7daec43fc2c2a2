import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.gson.JsonPrimitive;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Savepoint;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import java.util.function.Function;
import java.util.stream.StreamSupport;
import org.postgresql.util.PGInterval;

/** JDBC, through a Unix-domain socket. play describes requests and replies. */
public class Client {
	private static final Gson GSON = new GsonBuilder().serializeNulls().create();

	private final Connection connection;
	private final Deque<Savepoint> savepoints = new ArrayDeque<>();

	private Client(String host, boolean prepared) throws SQLException {
		Properties properties = new Properties();
		properties.setProperty("user", System.getenv("PGUSER"));
		properties.setProperty("socketFactory", "org.newsclub.net.unix.AFUNIXSocketFactory$FactoryArg");
		properties.setProperty("socketFactoryArg", host + "/.s.PGSQL." + System.getenv("PGPORT"));
		properties.setProperty("sslMode", "disable");
		properties.setProperty("prepareThreshold", prepared ? "1" : "0");
		connection = DriverManager.getConnection("jdbc:postgresql://localhost/" + System.getenv("PGDATABASE"), properties);
	}

	/** Returns the elements of a JSON array as an array of the driver. */
	private java.sql.Array array(String type, JsonElement values, Function<JsonElement, Object> convert) throws SQLException {
		Object[] elements = StreamSupport.stream(values.getAsJsonArray().spliterator(), false)
				.map(each -> each.isJsonNull() ? null : convert.apply(each)).toArray();
		return connection.createArrayOf(type, elements);
	}

	/** Sets a parameter with the method for the type in which an application has the argument. */
	private void set(PreparedStatement statement, int index, String kind, JsonElement value) throws SQLException {
		JsonPrimitive scalar = value.isJsonPrimitive() ? value.getAsJsonPrimitive() : null;
		switch (kind) {
			case "null" -> statement.setObject(index, null);
			case "wrapped" -> statement.setString(index, value.toString());
			case "UUID key" -> statement.setObject(index, UUID.fromString(value.getAsString()));
			case "integer key", "same" -> statement.setLong(index, value.getAsLong());
			case "integer" -> statement.setInt(index, value.getAsInt());
			case "interval" -> statement.setObject(index, new PGInterval(0, 0, 0, 0, 0, value.getAsDouble()));
			case "bytes" -> statement.setBytes(index, HexFormat.of().parseHex(value.getAsString()));
			case "texts", "nullable texts" -> statement.setArray(index, array("text", value, JsonElement::getAsString));
			case "UUIDs" -> statement.setArray(index, array("uuid", value, each -> UUID.fromString(each.getAsString())));
			case "integers" -> statement.setArray(index, array("bigint", value, JsonElement::getAsLong));
			default -> {
				if (scalar == null) statement.setObject(index, value);
				else if (scalar.isBoolean()) statement.setBoolean(index, scalar.getAsBoolean());
				else if (scalar.isNumber()) statement.setDouble(index, scalar.getAsDouble());
				else statement.setString(index, scalar.getAsString());
			}
		}
	}

	/** Returns the rows of a statement; with parse, each is its first column, parsed. */
	private JsonArray query(String sql, JsonArray arguments, boolean parse) throws SQLException {
		JsonArray rows = new JsonArray();
		try (PreparedStatement statement = connection.prepareStatement(sql)) {
			for (int i = 0; i < arguments.size(); i++) {
				JsonArray argument = arguments.get(i).getAsJsonArray();
				set(statement, i + 1, argument.get(0).getAsString(), argument.get(1));
			}
			if (!statement.execute()) return rows;
			ResultSet found = statement.getResultSet();
			while (found.next()) {
				JsonArray row = new JsonArray();
				for (int i = 1; i <= found.getMetaData().getColumnCount(); i++) {
					Object value = found.getObject(i);
					if (value instanceof Boolean || value instanceof Number) row.add(GSON.toJsonTree(value));
					else row.add(value == null ? JsonNull.INSTANCE : new JsonPrimitive(value.toString()));
				}
				rows.add(parse ? JsonParser.parseString(row.get(0).getAsString()) : row);
			}
		}
		return rows;
	}

	/** Does what a request says, and returns the rows. */
	private JsonArray answer(JsonObject request) throws SQLException {
		String action = request.get("do").getAsString();
		switch (action) {
			case "begin" -> connection.setAutoCommit(false);
			case "savepoint" -> savepoints.push(connection.setSavepoint());
			case "rollback to savepoint" -> connection.rollback(savepoints.pop());
			case "commit" -> {
				try {
					connection.commit();
				} finally {
					connection.setAutoCommit(true);
				}
			}
			case "rollback" -> {
				if (!connection.getAutoCommit()) connection.rollback();
				connection.setAutoCommit(true);
				savepoints.clear();
			}
			default -> {
				return query(request.get("sql").getAsString(), request.getAsJsonArray("arguments"), action.equals("query json"));
			}
		}
		return new JsonArray();
	}

	public static void main(String[] arguments) throws Exception {
		Map<String, Client> sessions = new HashMap<>();
		PrintStream output = new PrintStream(System.out, true, StandardCharsets.UTF_8);
		BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
		for (String line; (line = input.readLine()) != null;) {
			JsonObject request = JsonParser.parseString(line).getAsJsonObject();
			String host = request.get("host").getAsString();
			boolean prepared = request.get("prepared").getAsBoolean();
			String name = request.get("session").getAsString() + host + prepared;
			JsonObject reply = new JsonObject();
			try {
				if (!sessions.containsKey(name)) sessions.put(name, new Client(host, prepared));
				reply.add("rows", sessions.get(name).answer(request));
			} catch (SQLException error) {
				reply.addProperty("error", error.getSQLState());
				reply.addProperty("message", error.getMessage());
			}
			output.println(GSON.toJson(reply));
		}
	}
}
