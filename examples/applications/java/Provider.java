import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.Map;
import com.google.gson.Gson;

/** The client of the provider. */
class Provider {
	/** The provider neither charges nor refuses. */
	static class Unavailable extends Exception {
		Unavailable(String message) {
			super(message);
		}
	}

	/** Charges at the provider, which itself takes an idempotency key. Returns its charge, or null if it refuses. */
	static String charge(String key, long amount) throws Unavailable, InterruptedException {
		try {
			HttpRequest request = HttpRequest.newBuilder(URI.create(System.getenv("PROVIDER") + "/charges"))
					.timeout(Duration.ofSeconds(10)) // shorter than the lease, which the owner must not lose
					.header("Content-Type", "application/json").header("Idempotency-Key", '"' + key + '"')
					.POST(HttpRequest.BodyPublishers.ofString("{\"amount\": " + amount + "}")).build();
			HttpResponse<String> response = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
			if (response.statusCode() == 402) return null;
			if (response.statusCode() != 201) throw new Unavailable("the provider answers " + response.statusCode());
			return (String) new Gson().fromJson(response.body(), Map.class).get("id");
		} catch (IOException error) {
			throw new Unavailable("the provider: " + error);
		}
	}
}
