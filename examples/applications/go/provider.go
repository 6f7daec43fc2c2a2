// The client of the provider.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

var errRefused = errors.New("the provider refuses")

// askProvider charges at the provider, which itself takes an idempotency key, and returns
// its charge.
func askProvider(key string, amount int64) (string, error) {
	body := strings.NewReader(fmt.Sprintf(`{"amount": %d}`, amount))
	request, _ := http.NewRequest("POST", os.Getenv("PROVIDER")+"/charges", body)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", `"`+key+`"`)
	// Shorter than the lease, so that the owner does not lose it meanwhile.
	response, err := (&http.Client{Timeout: 10 * time.Second}).Do(request)
	if err != nil {
		return "", fmt.Errorf("the provider: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode == 402 {
		return "", errRefused
	}
	var answer struct{ ID string }
	if response.StatusCode != 201 || json.NewDecoder(response.Body).Decode(&answer) != nil {
		return "", fmt.Errorf("the provider answers %s", response.Status)
	}
	return answer.ID, nil
}
